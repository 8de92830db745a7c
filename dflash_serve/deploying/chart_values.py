"""Values of our Helm chart: a Deployment, and what is Kubernetes'. Each default stands here and in values.yaml.

`values_schema` makes values.schema.json from these types, so helm refuses an unknown key; what a type cannot say is in
the chart's `_validations.tpl`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from dflash_serve.deployment import Deployment

from .workload import (
    BASE_SECONDS,
    DRAIN_SECONDS,
    GIGABYTES_PER_SECOND,
    MARGIN_SECONDS,
    PRE_STOP_SECONDS,
    SHARED_MEMORY_GIB,
    USER,
)


class ValuesSection(BaseModel):
    """Unknown keys are refused; names are Kubernetes' style."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


class PinnedImage(ValuesSection):
    """A container image by digest."""

    repository: str = ""
    digest: str = ""
    """sha256:<64 hexadecimal digits>."""


class Image(PinnedImage):
    """What all but the build runs."""

    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: list[str] = []


class Resources(ValuesSection):
    """Of one pod, beside the GPUs, which are counted from the deployment."""

    cpu: str = "8"
    memory: str = "64Gi"
    extra: dict[str, str | int] = {}
    """Extended resources by name, such as rdma/ib."""


class Topology(ValuesSection):
    """Where all pods of a replica meet."""

    key: str = ""
    """A node label, such as nvidia.com/gpu.clique."""
    exclusive: bool = False
    """No other replica there."""


class Placement(ValuesSection):
    """On which nodes."""

    products: list[str] = []
    """Values of the node label nvidia.com/gpu.product."""
    compute_capability: str = ""
    """major.minor; empty = that of deployment.hardware.gpu."""
    topology: Topology = Topology()
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    runtime_class_name: str = ""
    priority_class_name: str = ""


class Models(ValuesSection):
    """Where weights are kept: /models."""

    kind: Literal["emptyDir", "volume", "claim", "image"] = "emptyDir"
    size: str = "500Gi"
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"] = "ReadWriteMany"
    storage_class_name: str = ""
    claim: str = ""
    image: str = ""
    """repository@sha256:<64 hexadecimal digits>."""


class HubToken(ValuesSection):
    """A Secret of this namespace; no name = none."""

    name: str = ""
    key: str = "token"


class ApiKeys(HubToken):
    """A Secret of this namespace; no name = an open server. One key a line; backends torch and sglang (one key)."""

    key: str = "keys"


class Secrets(ValuesSection):
    """By reference only."""

    hugging_face_token: HubToken = HubToken()
    api_keys: ApiKeys = ApiKeys()


class Build(ValuesSection):
    """`dflash-serve build` as a Job that servers wait for."""

    enabled: bool = False
    recipe: str = ""
    """The text of a recipe."""
    image: PinnedImage = PinnedImage()
    gpus: int = Field(1, ge=0)
    cpu: str = "8"
    memory: str = "64Gi"
    deadline_seconds: int = 14400


class Startup(ValuesSection):
    """How long a load may take."""

    base_seconds: int = BASE_SECONDS
    gigabytes: float | None = None
    """Weights of target and drafter; None = as much as the GPUs hold."""
    gigabytes_per_second: float = GIGABYTES_PER_SECOND


class Readiness(ValuesSection):
    """When a pod gets traffic."""

    acceptance: bool = True
    """Not before its drafter was seen to accept a token."""


class Drain(ValuesSection):
    """How a pod ends; the sum is its terminationGracePeriodSeconds."""

    pre_stop_seconds: int = PRE_STOP_SECONDS
    seconds: int = DRAIN_SECONDS
    margin_seconds: int = MARGIN_SECONDS


class Rollout(ValuesSection):
    """How a new version comes."""

    max_surge: int = Field(0, ge=0)
    max_unavailable: int = Field(1, ge=0)


class EngineProbes(ValuesSection):
    """Paths that the engine's own server answers; see `backend.Probes`."""

    started: str
    live: str
    ready: str


class EngineValues(ValuesSection):
    """How a backend is run and asked; `deploy --render helm` writes it for one that the chart does not know."""

    probes: EngineProbes
    metrics_path: str
    """Page of its Prometheus metrics."""
    queued: str
    """Gauge of requests that wait, by which replicas are added."""
    needs_gpu: bool
    server_flags: list[str] = []
    """Options of `serve` that its own server has, such as drain-seconds and api-key-file."""
    environment: dict[str, str] = {}
    """Variables of its container."""


class Disruption(ValuesSection):
    """The PodDisruptionBudget."""

    enabled: bool = True
    max_unavailable: int = 1


class Autoscaling(ValuesSection):
    """On requests that wait in the engines' queues."""

    kind: Literal["none", "hpa", "keda"] = "none"
    min_replicas: int = 1
    max_replicas: int = 4
    queued_per_replica: int = 5
    scale_down_seconds: int = 600
    prometheus_address: str = ""


class Service(ValuesSection):
    """The Kubernetes Service in front of the pods."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: int = 80
    annotations: dict[str, str] = {}


class NetworkPolicy(ValuesSection):
    """Who may come in, and where pods may go."""

    enabled: bool = True
    namespaces: list[str] = []
    """Beside the release's own."""
    egress_ports: list[int] = [443]


class PodMonitor(ValuesSection):
    """For the Prometheus operator."""

    enabled: bool = False
    interval_seconds: int = Field(15, ge=1)
    labels: dict[str, str] = {}


class Dashboards(ValuesSection):
    """A ConfigMap for Grafana's sidecar."""

    enabled: bool = False
    labels: dict[str, str] = {"grafana_dashboard": "1"}


class ServiceAccount(ValuesSection):
    """Never with a mounted token."""

    create: bool = True
    name: str = ""
    annotations: dict[str, str] = {}


class Verify(ValuesSection):
    """`dflash-serve verify` as a `helm test`."""

    enabled: bool = False
    without: str = ""
    """Base URL of a server of the same target, without a drafter."""


class Tests(ValuesSection):
    """What `helm test` does besides."""

    verify: Verify = Verify()


class Variable(ValuesSection):
    """Of the server's environment. Secrets do not belong here."""

    name: str
    value: str


class Values(ValuesSection):
    """values.yaml."""

    backend: str = "sglang"
    engine: EngineValues | None = None
    """None = backend is one that the chart knows."""
    deployment: Deployment
    image: Image = Image()
    replicas: int = 1
    resources: Resources = Resources()
    placement: Placement = Placement()
    models: Models = Models()
    secrets: Secrets = Secrets()
    build: Build = Build()
    startup: Startup = Startup()
    readiness: Readiness = Readiness()
    drain: Drain = Drain()
    rollout: Rollout = Rollout()
    disruption: Disruption = Disruption()
    autoscaling: Autoscaling = Autoscaling()
    service: Service = Service()
    network_policy: NetworkPolicy = NetworkPolicy()
    pod_monitor: PodMonitor = PodMonitor()
    dashboards: Dashboards = Dashboards()
    service_account: ServiceAccount = ServiceAccount()
    shared_memory: str = f"{SHARED_MEMORY_GIB}Gi"
    scratch: str = "50Gi"
    user: int = USER
    tests: Tests = Tests()
    env: list[Variable] = []
    pod_labels: dict[str, str] = {}
    pod_annotations: dict[str, str] = {}
    fullname_override: str = ""
