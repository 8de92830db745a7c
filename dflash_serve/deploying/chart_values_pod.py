"""Values of our Helm chart that become the server's pod: its image, resources, place, weights, rights and extras."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


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
    """Name without a tag."""
    digest: str = ""
    """sha256:<64 hexadecimal digits>."""


class Image(PinnedImage):
    """What all but the build runs."""

    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """Kubernetes' imagePullPolicy."""
    pull_secrets: list[str] = []
    """Names of Secrets of this namespace."""


class Resources(ValuesSection):
    """Of one pod, beside the GPUs, which are counted from the deployment. No CPU limit: throttling stalls GPUs."""

    cpu: str = ""
    """CPUs asked for; empty = 8 for each GPU."""
    memory: str = ""
    """Memory, asked for and limit; /dev/shm counts. Empty = 64Gi for each GPU."""
    extra: dict[str, str | int] = {}
    """Extended resources by name, such as rdma/ib."""


class Topology(ValuesSection):
    """Where all pods of a replica meet."""

    key: str = ""
    """A node label, such as nvidia.com/gpu.clique (gb200, gb300: an NVLink domain) or that of a leaf switch."""
    exclusive: bool = False
    """No other replica there."""


class Placement(ValuesSection):
    """On which nodes."""

    products: list[str] = []
    """Values of the node label nvidia.com/gpu.product; these, or computeCapability."""
    compute_capability: str = ""
    """major.minor; empty = that of deployment.hardware.gpu."""
    architecture: Literal["", "amd64", "arm64"] = ""
    """kubernetes.io/arch; empty = arm64 for gb200 and gb300, amd64 for any other GPU."""
    compute_domain: bool = False
    """Several nodes of gb200 or gb300 as one NVLink domain: a ComputeDomain of NVIDIA's DRA driver, and its claim."""
    topology: Topology = Topology()
    """Several nodes: where all pods of a replica meet."""
    node_selector: dict[str, str] = {}
    """Node labels that are wanted besides."""
    tolerations: list[dict[str, Any]] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    """Kubernetes' tolerations."""
    runtime_class_name: str = ""
    """A RuntimeClass, such as nvidia."""
    priority_class_name: str = ""
    """A PriorityClass."""
    scheduler_name: str = ""
    """Another scheduler, such as volcano or kai-scheduler; gangs of several nodes are its business."""


class Download(ValuesSection):
    """A Job that fetches target and drafter onto the claim before any server starts; servers then ask no hub."""

    enabled: bool = False
    """Whether there is one."""
    deadline_seconds: int = 14400
    """After so long it has failed; helm needs a longer --timeout."""


class Models(ValuesSection):
    """Where weights are kept: /models."""

    kind: Literal["emptyDir", "volume", "claim", "node", "image"] = "emptyDir"
    """emptyDir: every pod fetches its own; volume: a claim of this release; claim: yours; node: a folder of the node's
    own disks; image: read-only."""
    size: str = "500Gi"
    """Of emptyDir and volume; it has to hold startup.gigabytes."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"] = "ReadWriteMany"
    """Of volume and claim."""
    storage_class_name: str = ""
    """Of volume; empty = the cluster's default."""
    claim: str = ""
    """Name of your PersistentVolumeClaim."""
    path: str = ""
    """Of node: a folder that user 10001 may write, such as /raid/models."""
    image: str = ""
    """repository@sha256:<64 hexadecimal digits>; Kubernetes 1.33 or later with its feature ImageVolume."""
    encodings: str = ""
    """Folder with o200k_base.tiktoken, below /models; gpt-oss needs it where servers reach no network."""
    download: Download = Download()
    """A Job that fills the claim first."""


class Cache(ValuesSection):
    """Where /cache is kept: compiled kernels and measured costs."""

    kind: Literal["emptyDir", "models", "node"] = "emptyDir"
    """emptyDir: every new pod compiles and measures again; models: beside the weights, by image; node: on its disks."""
    path: str = ""
    """Of node: a folder that user 10001 may write, such as /raid/cache."""


class Security(ValuesSection):
    """Rights beyond none. Each of these loosens Pod Security, and says so where it is rendered."""

    capabilities: list[Literal["IPC_LOCK", "SYS_NICE", "SYS_PTRACE"]] = []
    """Left in the bounding set. Without root they only work where the image's program has them as file capabilities."""
    seccomp_profile: str = ""
    """A Localhost profile of the nodes, such as profiles/pidfd.json; empty = RuntimeDefault."""
    supplemental_groups: list[int] = []
    """Groups that own a shared file system."""
    check_memlock: bool = True
    """Several nodes: a pod that may not lock memory without bound ends with a line: RDMA would fall back to TCP."""


class KeyOf(ValuesSection):
    """One key of an object of this namespace."""

    name: str
    """The object's."""
    key: str
    """Of its data."""
    optional: bool = False
    """Whether it may be missing."""


class FieldOf(ValuesSection):
    """A field of the pod."""

    field_path: str
    """Such as status.hostIP."""


class VariableSource(ValuesSection):
    """Where a variable's value comes from: exactly one."""

    secret_key_ref: KeyOf | None = None
    """A Secret's key."""
    config_map_key_ref: KeyOf | None = None
    """A ConfigMap's key."""
    field_ref: FieldOf | None = None
    """A field of the pod."""


class Variable(ValuesSection):
    """Of the server's environment. Secrets go by reference."""

    name: str
    """Of the variable."""
    value: str | None = None
    """As text; this or valueFrom."""
    value_from: VariableSource | None = None
    """By reference; this or value."""


class HubToken(ValuesSection):
    """A Secret of this namespace; no name = none."""

    name: str = ""
    """The Secret's."""
    key: str = "token"
    """Of its data."""


class ApiKeys(HubToken):
    """A Secret of this namespace; no name = an open server. One key a line; backends torch and sglang (one key)."""

    key: str = "keys"
    """Of its data."""


class Secrets(ValuesSection):
    """By reference only."""

    hugging_face_token: HubToken = HubToken()
    """For gated repositories."""
    api_keys: ApiKeys = ApiKeys()
    """That clients have to show."""


class Build(ValuesSection):
    """`dflash-serve build` as a Job before servers start: a hook of install and upgrade, onto the models' claim."""

    enabled: bool = False
    """Whether there is one."""
    recipe: str = ""
    """The text of a recipe: --set-file build.recipe=FILE. What it made is at /build/drafter-fp8 etc."""
    image: PinnedImage = PinnedImage()
    """Of deploy/docker/engines.Dockerfile."""
    gpus: int = Field(1, ge=0)
    """Of the Job; 0 where all of them serve, the formats of a drafter are made on CPUs, too."""
    cpu: str = "8"
    """CPUs asked for."""
    memory: str = "64Gi"
    """Asked for, and limit."""
    deadline_seconds: int = 14400
    """After so long it has failed; helm needs a longer --timeout."""
