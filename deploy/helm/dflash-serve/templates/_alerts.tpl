{{- /* PromQL of the alerts: the expressions of the dashboard, for this release and a window of minutes.

dict "root" $ "line" PromQL "window" "15m", and "extra" label matchers */ -}}
{{- define "dflash-serve.line" -}}
{{- $where := printf "%s%s" (include "dflash-serve.series" .root) (.extra | default "") -}}
{{- .line | replace "namespace=~\"$namespace\", app_kubernetes_io_instance=~\"$release\"" $where | replace "$__rate_interval" .window -}}
{{- end -}}

{{- /* A rule: dict "root" $ "name" "expr" "for" "severity" "what" */ -}}
{{- define "dflash-serve.alert" -}}
- alert: {{ .name }}
  expr: {{ .expr | quote }}
  for: {{ .for }}
  labels: {severity: {{ .severity }}, release: {{ .root.Release.Name | quote }}}
  annotations:
    summary: {{ .what | quote }}
    runbook: {{ printf "docs/alerts.md#%s" (lower .name) }}
{{- end -}}

{{- define "dflash-serve.speculationAlerts" -}}
{{- $engine := include "dflash-serve.engine" . | fromYaml -}}
{{- with $engine.acceptanceLength }}
{{ include "dflash-serve.alert" (dict "root" $ "name" "DFlashAcceptanceLow" "for" "15m" "severity" "warning" "expr" (printf "avg(%s) < %v" (include "dflash-serve.line" (dict "root" $ "line" . "window" "15m")) $.Values.alerts.acceptanceLength) "what" "Fewer tokens are gained per verification than the baseline") }}
{{- end }}
{{- with $engine.survival }}
{{ include "dflash-serve.alert" (dict "root" $ "name" "DFlashDrafterDoesNotFit" "for" "15m" "severity" "warning" "expr" (printf "max(%s) < %v" (include "dflash-serve.line" (dict "root" $ "line" . "window" "15m")) $.Values.alerts.survival) "what" "Even the first drafted token is seldom accepted") }}
{{- end }}
{{- if and $engine.widths $engine.generated }}
{{- $drafting := include "dflash-serve.line" (dict "root" $ "line" $engine.widths "window" "30m" "extra" ", width!=\"1\"") }}
{{ include "dflash-serve.alert" (dict "root" $ "name" "DFlashDraftsNothing" "for" "1h" "severity" "info" "expr" (printf "sum(rate(%s{%s}[30m])) > 0 unless on() sum(%s) > 0" $engine.generated (include "dflash-serve.series" $) $drafting) "what" "For an hour drafting was found not to pay") }}
{{- end }}
{{- end -}}
