{{- define "dflash-serve.scaleTarget" -}}
{{- $several := gt ((include "dflash-serve.facts" . | fromYaml).nodes | int) 1 -}}
apiVersion: {{ $several | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" }}
kind: {{ $several | ternary "LeaderWorkerSet" "Deployment" }}
name: {{ include "dflash-serve.fullname" . | quote }}
{{- end -}}

{{- define "dflash-serve.scaleBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: {{ min 1800 (include "dflash-serve.graceSeconds" .) }}} # one replica drains at a time
{{- end -}}

{{- /* Gauges of a pod and the most that a replica may have of each: a list of {metric, most}. Read with fromYamlArray. */ -}}
{{- define "dflash-serve.loads" -}}
{{- $engine := include "dflash-serve.engine" . | fromYaml -}}
- {metric: {{ $engine.queued | quote }}, most: {{ .Values.autoscaling.queuedPerReplica | quote }}}
{{- with .Values.autoscaling.runningPerReplica }}
- {metric: {{ $engine.running | quote }}, most: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- /* Labels that the PodMonitor puts on every series of this release. */ -}}
{{- define "dflash-serve.series" -}}
namespace={{ .Release.Namespace | quote }}, app_kubernetes_io_instance={{ .Release.Name | quote }}
{{- end -}}
