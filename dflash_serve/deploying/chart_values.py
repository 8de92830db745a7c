"""Values of our Helm chart: a Deployment, and what is Kubernetes'. Each default stands here and in values.yaml.

`values_schema` makes values.schema.json from these types, so helm refuses an unknown key; what a type cannot say is in
the chart's `_validations*.tpl`.
"""

from __future__ import annotations

from typing import Any

from dflash_serve.deployment import Deployment

from . import chart_values_cluster as cluster
from . import chart_values_pod as pod
from .workload import SHARED_MEMORY_GIB, USER


class Values(pod.ValuesSection):
    """values.yaml."""

    backend: str = "sglang"
    """sglang, vllm, tensorrt-llm, or torch (the embedded engine: a CPU or one GPU)."""
    engine: cluster.EngineValues | None = None
    """Of any other backend, how it is asked; None = backend is one that the chart knows."""
    deployment: Deployment
    """What is served: read by `dflash-serve serve` word for word."""
    image: pod.Image = pod.Image()
    """A layer of deploy/docker."""
    replicas: int = 1
    """Each has hardware.count GPUs of its own; autoscaling overrules it."""
    resources: pod.Resources = pod.Resources()
    """Of one pod."""
    placement: pod.Placement = pod.Placement()
    """On which nodes."""
    models: pod.Models = pod.Models()
    """Where weights are kept."""
    cache: pod.Cache = pod.Cache()
    """Where compiled kernels and measured costs are kept."""
    secrets: pod.Secrets = pod.Secrets()
    """By reference only."""
    build: pod.Build = pod.Build()
    """A Job that quantises before servers start."""
    startup: cluster.Startup = cluster.Startup()
    """How long a load may take."""
    readiness: cluster.Readiness = cluster.Readiness()
    """When a pod gets traffic."""
    drain: cluster.Drain = cluster.Drain()
    """How a pod ends."""
    rollout: cluster.Rollout = cluster.Rollout()
    """How a new version comes."""
    disruption: cluster.Disruption = cluster.Disruption()
    """Voluntary evictions."""
    autoscaling: cluster.Autoscaling = cluster.Autoscaling()
    """When there are more replicas."""
    service: cluster.Service = cluster.Service()
    """In front of the pods."""
    route: cluster.Route = cluster.Route()
    """A Gateway API HTTPRoute."""
    inference_pool: cluster.InferencePool = cluster.InferencePool()
    """For an endpoint picker."""
    network_policy: cluster.NetworkPolicy = cluster.NetworkPolicy()
    """Who may come in, and where pods may go."""
    pod_monitor: cluster.PodMonitor = cluster.PodMonitor()
    """For the Prometheus operator."""
    alerts: cluster.Alerts = cluster.Alerts()
    """For the Prometheus operator, too."""
    dashboards: cluster.Dashboards = cluster.Dashboards()
    """For Grafana's sidecar."""
    service_account: cluster.ServiceAccount = cluster.ServiceAccount()
    """Of servers and Jobs."""
    shared_memory: str = f"{SHARED_MEMORY_GIB}Gi"
    """Of the folder /dev/shm; counted in resources.memory."""
    scratch: str = "50Gi"
    """/cache, /prepared and /tmp, each at most; all the rest is read-only."""
    user: int | None = USER
    """And group; null = one that the namespace chooses (OpenShift)."""
    security: pod.Security = pod.Security()
    """Rights beyond none."""
    host_network: bool = False
    """The node's own network, past the network policy: only where RDMA cannot do without."""
    tests: cluster.Tests = cluster.Tests()
    """What `helm test` does besides chatting and streaming."""
    env: list[pod.Variable] = []
    """Of the server's environment: {name, value} or {name, valueFrom}."""
    extra_volumes: list[dict[str, Any]] = []
    """Kubernetes' volumes, such as a private CA."""
    extra_volume_mounts: list[dict[str, Any]] = []
    """Where the server finds them."""
    init_containers: list[dict[str, Any]] = []
    """Kubernetes' containers, run before the server and after this chart's own."""
    labels: dict[str, str] = {}
    """Of the server's Deployment or LeaderWorkerSet: Kueue's queue, say."""
    pod_labels: dict[str, str] = {}
    """Of the server's pods."""
    pod_annotations: dict[str, str] = {}
    """Of the server's pods."""
    fullname_override: str = ""
    """Name of all objects; empty = the release's and the chart's."""
