{{- /* What a cluster could not do, or should not. */ -}}

{{- define "dflash-serve.problems.placement" -}}
{{- $facts := include "dflash-serve.facts" . | fromYaml }}
{{- with .Values.placement }}
{{- if and .products .computeCapability }}
placement.computeCapability: placement.products says it already; give one of them
{{- end }}
{{- range .products }}
{{- if contains "MIG" . }}
placement.products: {{ . | quote }} is a slice of a GPU; give a whole one
{{- end }}
{{- end }}
{{- if .computeCapability }}
{{- if not (regexMatch "^[0-9]+\\.[0-9]+$" .computeCapability) }}
placement.computeCapability: {{ .computeCapability | quote }} is none; write major.minor in quotes, such as "10.3"
{{- else }}
{{- $known := get (include "dflash-serve.capabilities" $ | fromYaml) $facts.gpu }}
{{- if and $known (ne $known .computeCapability) }}
placement.computeCapability: {{ .computeCapability }} is no {{ $facts.gpu }}, which deployment.hardware.gpu names and is {{ $known }}; change one
{{- end }}
{{- end }}
{{- end }}
{{- if and (or .products .computeCapability) (eq ($facts.gpusPerPod | int) 0) }}
placement: a GPU is wanted, but the deployment uses none; set deployment.hardware.gpu
{{- end }}
{{- if and .topology.key (eq ($facts.nodes | int) 1) }}
placement.topology.key: a replica of one node meets nobody; leave it out
{{- end }}
{{- $grace := hasPrefix "gb" $facts.gpu }}
{{- if and (eq .topology.key "nvidia.com/gpu.clique") $facts.gpu (not $grace) }}
placement.topology.key: {{ $facts.gpu }} has no NVLink between nodes, so nvidia.com/gpu.clique is nowhere; give the label of a leaf switch or rack
{{- end }}
{{- if and .topology.key (not .topology.exclusive) (gt ($facts.nodes | int) 1) (not (semverCompare ">=1.31.0-0" $.Capabilities.KubeVersion.Version)) }}
placement.topology.key: pods of one replica alone are kept together from Kubernetes 1.31 on, this is {{ $.Capabilities.KubeVersion.Version }}; set placement.topology.exclusive
{{- end }}
{{- if and $grace (gt ($facts.nodes | int) 1) (not .computeDomain) }}
placement.computeDomain: {{ $facts.gpu }} on {{ $facts.nodes }} nodes has no NVLink between them without an IMEX channel; set it to true
{{- end }}
{{- if .computeDomain }}
{{- if not (and $grace (gt ($facts.nodes | int) 1)) }}
placement.computeDomain: there is a domain over several nodes of gb200 or gb300 alone; leave it out
{{- end }}
{{- if or (gt (include "dflash-serve.maxReplicas" $ | int) 1) (gt (int $.Values.rollout.maxSurge) 0) }}
placement.computeDomain: a domain belongs to one replica; set replicas to 1, autoscaling.kind to none and rollout.maxSurge to 0, and install a release for each
{{- end }}
{{- if not (semverCompare ">=1.32.0-0" $.Capabilities.KubeVersion.Version) }}
placement.computeDomain: NVIDIA's DRA driver needs Kubernetes 1.32, this is {{ $.Capabilities.KubeVersion.Version }}
{{- end }}
{{- end }}
{{- if and .architecture $facts.gpu (ne $facts.gpu "none") (ne .architecture ($grace | ternary "arm64" "amd64")) }}
placement.architecture: {{ $facts.gpu }} is on no {{ .architecture }} node; leave it out
{{- end }}
{{- if and .topology.exclusive (not .topology.key) }}
placement.topology.exclusive: of what? set placement.topology.key, such as nvidia.com/gpu.clique
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.replicas" -}}
{{- if lt (int .Values.replicas) 1 }}
replicas: {{ .Values.replicas }} serve nobody; use 1 or more, or uninstall
{{- end }}
{{- with .Values.autoscaling }}
{{- if ne .kind "none" }}
{{- if lt (int .minReplicas) 1 }}
autoscaling.minReplicas: with {{ .minReplicas }}, nothing would start the first again: no server, no queue; use 1 or more
{{- end }}
{{- if lt (int .maxReplicas) (int .minReplicas) }}
autoscaling.maxReplicas: {{ .maxReplicas }} is less than minReplicas {{ .minReplicas }}; raise it
{{- end }}
{{- if lt (int .queuedPerReplica) 1 }}
autoscaling.queuedPerReplica: {{ .queuedPerReplica }} would always add replicas; use 1 or more
{{- end }}
{{- if lt (int .scaleDownSeconds) 0 }}
autoscaling.scaleDownSeconds: {{ .scaleDownSeconds }} is in the past; use 0 or more
{{- end }}
{{- if and .runningPerReplica (not (include "dflash-serve.engine" $ | fromYaml).running) }}
autoscaling.runningPerReplica: {{ $.Values.backend }} names no gauge of running requests; leave it out
{{- end }}
{{- if lt (int .runningPerReplica) 0 }}
autoscaling.runningPerReplica: {{ .runningPerReplica }} is no number of requests; use 1 or more, or 0 to leave it out
{{- end }}
{{- if and .interTokenSeconds (ne .kind "keda") }}
autoscaling.interTokenSeconds: a percentile is asked of Prometheus, which only keda does; leave it out, or set kind to keda
{{- end }}
{{- if and .interTokenSeconds (not (include "dflash-serve.engine" $ | fromYaml).interTokenLatency) }}
autoscaling.interTokenSeconds: {{ $.Values.backend }} names no histogram of it; leave it out
{{- end }}
{{- if not $.Values.podMonitor.enabled }}
autoscaling.kind: {{ .kind }} reads the queue from Prometheus, which does not scrape it; set podMonitor.enabled
{{- end }}
{{- end }}
{{- if and (eq .kind "keda") (not (regexMatch "^https?://" .prometheusAddress)) }}
autoscaling.prometheusAddress: {{ .prometheusAddress | quote }} is no address; give one such as http://prometheus.monitoring:9090
{{- end }}
{{- if and (ne .kind "keda") .prometheusAddress }}
autoscaling.prometheusAddress: only keda asks Prometheus itself, kind is {{ .kind }}; leave it out (keda and hpa exclude each other)
{{- end }}
{{- end }}
{{- if and .Values.disruption.enabled (lt (int .Values.disruption.maxUnavailable) 1) }}
disruption.maxUnavailable: {{ .Values.disruption.maxUnavailable }} forbids every eviction, and no node could be drained; use 1 or more
{{- end }}
{{- with .Values.rollout }}
{{- if and (lt (int .maxSurge) 1) (lt (int .maxUnavailable) 1) }}
rollout: neither one more nor one less: it could not move; set maxSurge or maxUnavailable to 1
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.lifetime" -}}
{{- with .Values.drain }}
{{- range $name := list "preStopSeconds" "seconds" "marginSeconds" }}
{{- if lt (get $.Values.drain $name | int) 1 }}
drain.{{ $name }}: {{ get $.Values.drain $name }} is no time; the grace must be longer than preStop and drain together; use 1 or more
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.startup }}
{{- if le (float64 .gigabytesPerSecond) 0.0 }}
startup.gigabytesPerSecond: at {{ .gigabytesPerSecond }} nothing ever loads; measure your storage
{{- end }}
{{- if and (hasKey . "gigabytes") (le (float64 (get . "gigabytes" | default 0)) 0.0) }}
startup.gigabytes: {{ get . "gigabytes" }} is no size; leave it out to assume what the GPUs hold
{{- end }}
{{- if lt (int .baseSeconds) 30 }}
startup.baseSeconds: engines start in no {{ .baseSeconds }} s; use 30 or more
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.doors" -}}
{{- if and .Values.secrets.apiKeys.name (not (has "api-key-file" (include "dflash-serve.engine" . | fromYaml).serverFlags)) }}
secrets.apiKeys.name: {{ .Values.backend }} is started without keys; let a gateway ask for them, or use backend torch, sglang or vllm
{{- end }}
{{- if and (ne .Values.service.type "ClusterIP") (not .Values.secrets.apiKeys.name) }}
service.type: {{ .Values.service.type }} opens a server without keys to the world; keep ClusterIP behind a gateway, or set secrets.apiKeys.name
{{- end }}
{{- range $name := list "huggingFaceToken" "apiKeys" }}
{{- if not (get (get $.Values.secrets $name) "key") }}
secrets.{{ $name }}.key: none; name the key of the Secret
{{- end }}
{{- end }}
{{- $traces := dig "serving" "otlp_traces_endpoint" "" .Values.deployment }}
{{- $port := regexFind "[0-9]+" (regexFind ":[0-9]+(/|$)" ($traces | default "")) }}
{{- if and $traces .Values.networkPolicy.enabled (not (has $port (toStrings .Values.networkPolicy.egressPorts))) }}
deployment.serving.otlp_traces_endpoint: networkPolicy.egressPorts forbids port {{ $port }}; add it there
{{- end }}
{{- range .Values.networkPolicy.egressPorts }}
{{- if or (lt (int .) 1) (gt (int .) 65535) }}
networkPolicy.egressPorts: {{ . }} is no port; use 1 to 65535
{{- end }}
{{- end }}
{{- if or (lt (int .Values.service.port) 1) (gt (int .Values.service.port) 65535) }}
service.port: {{ .Values.service.port }} is no port; use 1 to 65535
{{- end }}
{{- if and (not .Values.serviceAccount.create) .Values.serviceAccount.annotations }}
serviceAccount.annotations: would be ignored; set serviceAccount.create
{{- end }}
{{- if and (hasKey .Values "user") (not (kindIs "invalid" .Values.user)) (lt (int .Values.user) 1) }}
user: {{ .Values.user }} is root; use 1 or more
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.namespaces) }}
podMonitor.enabled: Prometheus comes from another namespace, and networkPolicy denies it; name it in networkPolicy.namespaces
{{- end }}
{{- if and .Values.alerts.enabled (not .Values.podMonitor.enabled) }}
alerts.enabled: nothing is scraped that they could look at; set podMonitor.enabled
{{- end }}
{{- range .Values.networkPolicy.dnsPorts }}
{{- if or (lt (int .) 1) (gt (int .) 65535) }}
networkPolicy.dnsPorts: {{ . }} is no port; use 53, on OpenShift 5353 too
{{- end }}
{{- end }}
{{- if and .Values.hostNetwork .Values.networkPolicy.enabled }}
hostNetwork: a network policy does not hold for it; set networkPolicy.enabled to false, and guard the nodes' port 8000
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.environment" -}}
{{- range .Values.env }}
{{- if eq (and (hasKey . "value") (not (kindIs "invalid" .value))) (hasKey . "valueFrom") }}
env: {{ .name }} needs a value or a valueFrom, one of them
{{- end }}
{{- if hasKey . "valueFrom" }}
{{- if ne (len .valueFrom) 1 }}
env: {{ keys .valueFrom | sortAlpha | join " and " | default "nothing" }} in one valueFrom; give exactly one
{{- end }}
{{- end }}
{{- if hasPrefix "DFLASH_SERVE_" .name }}
env: {{ .name }} would overrule the deployment unseen; write it into `deployment`
{{- else if hasPrefix "LWS_" .name }}
env: {{ .name }} is LeaderWorkerSet's to set; leave it out
{{- else if has .name (list "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN") }}
env: {{ .name }} is a secret; put it into a Secret, and name that in secrets.huggingFaceToken
{{- else if has .name (list "HOME" "USER" "HF_HOME" "HF_HUB_OFFLINE" "XDG_CACHE_HOME" "HF_TOKEN_PATH" "TIKTOKEN_ENCODINGS_BASE") }}
env: {{ .name }} is set by this chart; leave it out
{{- end }}
{{- if hasPrefix "hf_" (dig "value" "" . | toString) }}
env: {{ .name }} looks like a Hugging Face token; put it into a Secret, and name that in secrets.huggingFaceToken
{{- end }}
{{- end }}
{{- $ours := list "config" "models" "hub" "keys" "cache" "prepared" "tmp" "shm" }}
{{- range .Values.extraVolumes }}
{{- if or (not .name) (has .name $ours) }}
extraVolumes: {{ .name | default "one without a name" }} would hide a volume of this chart; give it a name of its own
{{- end }}
{{- end }}
{{- range .Values.extraVolumeMounts }}
{{- $path := .mountPath | default "" }}
{{- if or (not (hasPrefix "/" $path)) (has ($path | trimSuffix "/") (list "" "/etc/dflash-serve" "/etc/dflash-serve-hub" "/etc/dflash-serve-keys" "/models" "/build" "/cache" "/prepared" "/tmp" "/dev/shm")) }}
extraVolumeMounts: {{ $path | quote }} is this chart's; mount it somewhere else
{{- end }}
{{- end }}
{{- range .Values.initContainers }}
{{- if has (.name | default "") (list "" "server" "check-node" "verify-build") }}
initContainers: {{ .name | default "one without a name" | quote }} is no name for yours; give it one of its own
{{- end }}
{{- end }}
{{- range $name, $_ := .Values.labels }}
{{- if or (hasPrefix "app.kubernetes.io/" $name) (hasPrefix "helm.sh/" $name) }}
labels: {{ $name }} is set by this chart; leave it out
{{- end }}
{{- end }}
{{- range $name, $_ := .Values.podLabels }}
{{- if hasPrefix "app.kubernetes.io/" $name }}
podLabels: {{ $name }} is what the Service selects by; leave it out
{{- end }}
{{- end }}
{{- if not (regexMatch "^([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?$" .Values.fullnameOverride) }}
fullnameOverride: {{ .Values.fullnameOverride | quote }} is no name; use 40 lower-case letters, digits and dashes at most, a letter first
{{- end }}
{{- end -}}
