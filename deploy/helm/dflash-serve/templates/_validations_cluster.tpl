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
{{- $known := get (dict "h100" "9.0" "h200" "9.0" "b200" "10.0" "b300" "10.3" "gb200" "10.0" "gb300" "10.3") $facts.gpu }}
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
{{- if lt (int .Values.user) 1 }}
user: {{ .Values.user }} is root; use 1 or more
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.environment" -}}
{{- range .Values.env }}
{{- if hasPrefix "DFLASH_SERVE_" .name }}
env: {{ .name }} would overrule the deployment unseen; write it into `deployment`
{{- else if hasPrefix "LWS_" .name }}
env: {{ .name }} is LeaderWorkerSet's to set; leave it out
{{- else if has .name (list "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN") }}
env: {{ .name }} is a secret; put it into a Secret, and name that in secrets.huggingFaceToken
{{- else if has .name (list "HOME" "USER" "HF_HOME" "XDG_CACHE_HOME" "HF_TOKEN_PATH") }}
env: {{ .name }} is set by this chart; leave it out
{{- end }}
{{- if hasPrefix "hf_" (dig "value" "" . | toString) }}
env: {{ .name }} looks like a Hugging Face token; put it into a Secret, and name that in secrets.huggingFaceToken
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
