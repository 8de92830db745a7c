{{- define "dflash-serve.fullname" -}}
{{- .Values.fullnameOverride | default (contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Labels of selectors: they must not change in an upgrade. */ -}}
{{- define "dflash-serve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "dflash-serve.labels" -}}
{{ include "dflash-serve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* metadata of an object: dict "root" $ "suffix" "-x" */ -}}
{{- define "dflash-serve.metadata" -}}
name: {{ printf "%s%s" (include "dflash-serve.fullname" .root) .suffix | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "dflash-serve.labels" .root | nindent 2 }}
{{- end -}}

{{- define "dflash-serve.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "dflash-serve.fullname" .) "default") -}}
{{- end -}}

{{- define "dflash-serve.image" -}}
{{ .repository }}@{{ .digest }}
{{- end -}}

{{- /* "yes" for a pair: prefill and decode servers in one release. */ -}}
{{- define "dflash-serve.isPair" -}}
{{- ternary "yes" "" (kindIs "map" (get .Values.deployment "pair")) -}}
{{- end -}}

{{- /* Kinds of servers: one without a name, or the halves of the pair. Their objects are made from values with `half` in
them. Read with fromJsonArray. */ -}}
{{- define "dflash-serve.kinds" -}}
{{- ternary (list "prefill" "decode") (list "") (eq (include "dflash-serve.isPair" .) "yes") | toJson -}}
{{- end -}}

{{- /* Label by which the pods of one half are selected, also by llm-d. */ -}}
{{- define "dflash-serve.halfLabel" -}}
{{- with .Values.half }}
llm-d.ai/role: {{ . }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.suffix" -}}
{{- with .Values.half }}-{{ . }}{{ end -}}
{{- end -}}

{{- /* Facts that follow from the deployment; read with fromYaml. */ -}}
{{- define "dflash-serve.facts" -}}
{{- $deployment := .Values.deployment -}}
{{- $half := get (get $deployment "pair" | default dict) (.Values.half | default "") | default dict -}}
{{- $gpu := dig "hardware" "gpu" "" $deployment | default "" -}}
{{- $count := $half.gpus | default (dig "hardware" "count" 1 $deployment) | int -}}
{{- $nodes := $half.nodes | default (dig "parallel" "nodes" 1 $deployment) | int -}}
{{- /* YAML reads a bare `off` as false. */ -}}
{{- $width := dig "speculation" "width" "auto" $deployment | toString | replace "false" "off" -}}
{{- $cpu := or (eq $gpu "none") (and (eq $gpu "") (not (include "dflash-serve.engine" . | fromYaml).needsGpu)) -}}
gpu: {{ $gpu | quote }}
count: {{ $count }}
replicas: {{ ternary ($half.replicas | default 1) .Values.replicas (not (empty .Values.half)) }}
nodes: {{ $nodes }}
gpusPerPod: {{ $cpu | ternary 0 (div $count (max 1 $nodes)) }}
speculates: {{ if and (get $deployment "drafter") (not (has $width (list "off" "1"))) }}true{{ else }}false{{ end }}
width: {{ $width | quote }}
{{- end -}}

{{- define "dflash-serve.scaled" -}}
{{- ternary "" "yes" (eq .Values.autoscaling.kind "none") -}}
{{- end -}}

{{- /* The largest number of replicas. */ -}}
{{- define "dflash-serve.maxReplicas" -}}
{{- if include "dflash-serve.isPair" . -}}
{{- add (dig "prefill" "replicas" 1 .Values.deployment.pair) (dig "decode" "replicas" 1 .Values.deployment.pair) -}}
{{- else -}}
{{- ternary .Values.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.kind "none") | int -}}
{{- end -}}
{{- end -}}

{{- /* Probes and metric names of the engine: from the values, or from files/engines.yaml. Read with fromYaml. */ -}}
{{- define "dflash-serve.engine" -}}
{{- $none := dict "probes" dict "serverFlags" list "environment" dict -}}
{{- .Values.engine | default (get (.Files.Get "files/engines.yaml" | fromYaml) .Values.backend) | default $none | toYaml -}}
{{- end -}}

{{- /* "yes" for a backend of files/engines.yaml: files/ready.py can see its drafter accept tokens. */ -}}
{{- define "dflash-serve.isKnown" -}}
{{- ternary "yes" "" (hasKey (.Files.Get "files/engines.yaml" | fromYaml) .Values.backend) -}}
{{- end -}}

{{- define "dflash-serve.model" -}}
{{- dig "target" "model" "" .Values.deployment -}}
{{- end -}}

{{- /* The model name in clients' requests. */ -}}
{{- define "dflash-serve.servedModel" -}}
{{- dig "serving" "served_model_name" "" .Values.deployment | default (include "dflash-serve.model" .) -}}
{{- end -}}
