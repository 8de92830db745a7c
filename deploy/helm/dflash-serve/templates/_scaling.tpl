{{- define "dflash-serve.scaleTarget" -}}
{{- $several := gt ((include "dflash-serve.facts" . | fromYaml).nodes | int) 1 -}}
apiVersion: {{ $several | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" }}
kind: {{ $several | ternary "LeaderWorkerSet" "Deployment" }}
name: {{ include "dflash-serve.fullname" . }}
{{- end -}}

{{- define "dflash-serve.scaleBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: {{ include "dflash-serve.graceSeconds" . }}} # one drains at a time
{{- end -}}
