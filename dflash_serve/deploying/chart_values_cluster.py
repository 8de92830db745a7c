"""Values of our Helm chart that become what stands around the server: its life, scaling, doors, watchers and tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .chart_values_pod import ValuesSection
from .workload import BASE_SECONDS, DRAIN_SECONDS, GIGABYTES_PER_SECOND, MARGIN_SECONDS, PRE_STOP_SECONDS


class Startup(ValuesSection):
    """How long a load may take."""

    base_seconds: int = BASE_SECONDS
    """Compilation, graphs, warm-up."""
    gigabytes: float | None = None
    """Weights of target and drafter; None = as much as the GPUs hold."""
    gigabytes_per_second: float = GIGABYTES_PER_SECOND
    """Of your storage."""


class Readiness(ValuesSection):
    """When a pod gets traffic."""

    acceptance: bool = True
    """Not before its drafter was seen to accept a token."""


class Drain(ValuesSection):
    """How a pod ends; the sum is its terminationGracePeriodSeconds."""

    pre_stop_seconds: int = PRE_STOP_SECONDS
    """For routers to notice."""
    seconds: int = DRAIN_SECONDS
    """For answers that have begun."""
    margin_seconds: int = MARGIN_SECONDS
    """For the process to end by itself."""


class Rollout(ValuesSection):
    """How a new version comes."""

    max_surge: int = Field(0, ge=0)
    """Replicas beyond the wanted number; 1 where GPUs are to spare."""
    max_unavailable: int = Field(1, ge=0)
    """Replicas that may be missing meanwhile."""


class EngineProbes(ValuesSection):
    """Paths that the engine's own server answers; see `backend.Probes`."""

    started: str
    """Everything is loaded."""
    live: str
    """Shallow: says no only when a new process would help."""
    ready: str
    """New requests are taken."""


class EngineValues(ValuesSection):
    """How a backend is run and asked; `deploy --render helm` writes it for one that the chart does not know."""

    probes: EngineProbes
    """Paths that its server answers."""
    metrics_path: str
    """Page of its Prometheus metrics."""
    queued: str
    """Gauge of requests that wait, by which replicas are added."""
    running: str | None = None
    """Gauge of requests in the batch."""
    generated: str | None = None
    """Counter of tokens generated."""
    inter_token_latency: str | None = None
    """Histogram of seconds between tokens, without _bucket."""
    queue_time: str | None = None
    """Histogram of seconds in the queue, without _bucket."""
    acceptance_length: str | None = None
    """PromQL as on the dashboard: the tokens gained per verification."""
    survival: str | None = None
    """PromQL as on the dashboard: by slot, the share of drafted tokens that is accepted."""
    widths: str | None = None
    """PromQL as on the dashboard: verifications a second by their label `width`."""
    needs_gpu: bool
    """Whether it runs on GPUs alone."""
    server_flags: list[str] = []
    """Options of `serve` that its own server has, such as drain-seconds and api-key-file."""
    environment: dict[str, str] = {}
    """Variables of its container."""


class Disruption(ValuesSection):
    """The PodDisruptionBudget, over all nodes of a replica."""

    enabled: bool = True
    """Whether there is one."""
    max_unavailable: int = 1
    """Pods that voluntary evictions may take at a time."""


class Autoscaling(ValuesSection):
    """On requests that wait, that run, or on the time between tokens."""

    kind: Literal["none", "hpa", "keda"] = "none"
    """hpa: a Prometheus adapter has to hand on the gauges under their own names."""
    min_replicas: int = 1
    """At least so many."""
    max_replicas: int = 4
    """At most so many."""
    queued_per_replica: int = 5
    """Requests that wait in a replica's queue."""
    running_per_replica: int = 0
    """Requests in a replica's batch, kept where speculation still gains; 0 = not looked at."""
    inter_token_seconds: float = Field(0, ge=0)
    """95th percentile of the time between tokens (keda); 0 = not looked at."""
    scale_down_seconds: int = 600
    """A replica is slow to come back."""
    prometheus_address: str = ""
    """keda: http://prometheus.monitoring:9090."""


class Service(ValuesSection):
    """The Kubernetes Service in front of the pods."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Anything but ClusterIP needs secrets.apiKeys."""
    port: int = 80
    """Its own; pods listen on 8000."""
    annotations: dict[str, str] = {}
    """Of a cloud's load balancer, say."""


class Canary(ValuesSection):
    """Another release of this chart, such as one with a new drafter, that gets a share of the route's requests."""

    service: str = ""
    """Its Service in this namespace; empty = none."""
    weight: int = Field(0, ge=0, le=100)
    """Its share in percent."""


class Route(ValuesSection):
    """A Gateway API HTTPRoute to this release, and to a canary."""

    enabled: bool = False
    """Whether there is one."""
    gateway: str = ""
    """Name of the Gateway."""
    gateway_namespace: str = ""
    """Of the Gateway; empty = the release's."""
    hostnames: list[str] = []
    """Host names it answers to; none = all of the Gateway's."""
    canary: Canary = Canary()
    """A release that gets a share."""


class InferencePool(ValuesSection):
    """Gateway API inference extension: these pods as a pool, chosen among by an endpoint picker of yours."""

    enabled: bool = False
    """Whether there is one; the route then goes to it."""
    endpoint_picker: str = ""
    """Service of the endpoint picker."""
    endpoint_picker_port: int = 9002
    """Its gRPC port."""


class NetworkPolicy(ValuesSection):
    """Who may come in, and where pods may go."""

    enabled: bool = True
    """Whether there is one."""
    namespaces: list[str] = []
    """Namespaces that may ask, beside the release's own: your gateway's and your Prometheus'."""
    egress_ports: list[int] = [443]
    """Ports of the world that pods may reach: the hub's."""
    dns_ports: list[int] = [53]
    """Of the cluster's name servers; OpenShift's pods listen on 5353."""


class PodMonitor(ValuesSection):
    """For the Prometheus operator."""

    enabled: bool = False
    """Whether there is one."""
    interval_seconds: int = Field(15, ge=1)
    """Between two scrapes."""
    labels: dict[str, str] = {}
    """By which your Prometheus finds it."""


class Alerts(ValuesSection):
    """A PrometheusRule; each alert links to the page that says what to do."""

    enabled: bool = False
    """Whether there is one; podMonitor has to be enabled, too."""
    labels: dict[str, str] = {}
    """By which your Prometheus finds it."""
    acceptance_length: float = Field(1.5, ge=1)
    """Below this for 15 minutes is an alert: your baseline less what it may vary."""
    survival: float = Field(0.3, ge=0, le=1)
    """Of slot 1; below this the drafter does not fit what is asked."""
    queue_seconds: float = Field(10, gt=0)
    """Waiting time, 95th percentile, above which is an alert."""


class Dashboards(ValuesSection):
    """A ConfigMap for Grafana's sidecar."""

    enabled: bool = False
    """Whether there is one."""
    labels: dict[str, str] = {"grafana_dashboard": "1"}
    """By which the sidecar finds it."""


class ServiceAccount(ValuesSection):
    """Never with a mounted token."""

    create: bool = True
    """Whether the chart makes it."""
    name: str = ""
    """Empty = the release's."""
    annotations: dict[str, str] = {}
    """Of a cloud's workload identity, say."""


class Verify(ValuesSection):
    """`dflash-serve verify`: is every token the one that is served without speculation?"""

    enabled: bool = False
    """Whether `helm test` does it, too."""
    without: str = ""
    """Base URL of a server of the same target, without a drafter."""
    deadline_seconds: int = 3600
    """After so long it has failed; helm test needs a longer --timeout."""
    schedule: str = ""
    """A CronJob does it too, such as "0 3 * * *"; empty = none."""


class AcceptanceGate(ValuesSection):
    """The gate of a new drafter: acceptance of fixed questions against a baseline."""

    at_least: float = Field(0, ge=0)
    """Tokens per verification, the bonus token counted, below which `helm test` fails; 0 = not asked."""
    schedule: str = ""
    """A CronJob asks it too, such as "0 * * * *"; empty = none."""


class Tests(ValuesSection):
    """What `helm test` does besides."""

    verify: Verify = Verify()
    """Losslessness against a plain server."""
    acceptance: AcceptanceGate = AcceptanceGate()
    """Acceptance against a baseline."""
