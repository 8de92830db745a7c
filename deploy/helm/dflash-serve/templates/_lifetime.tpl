{{- /* Times of loading, probes and termination. */ -}}

{{- /* The grace period contains preStop and then the drain, so it is longer than both. */ -}}
{{- define "dflash-serve.graceSeconds" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.seconds .Values.drain.marginSeconds -}}
{{- end -}}

{{- /* Gigabytes to load: the value, or the memory of the GPUs (64 GB if none is named). */ -}}
{{- define "dflash-serve.gigabytes" -}}
{{- $facts := include "dflash-serve.facts" . | fromYaml -}}
{{- $memory := dict "a100" 80 "l40s" 46 "h100" 80 "h200" 141 "b200" 180 "b300" 268 "gb200" 186 "gb300" 278 -}}
{{- $memory = merge $memory (dict "rtx-pro-6000" 98 "rtx-5090" 33 "rtx-6000d" 86 "gb10" 120) -}}
{{- .Values.startup.gigabytes | default (mulf (get $memory $facts.gpu | default 64) $facts.count) -}}
{{- end -}}

{{- define "dflash-serve.startupSeconds" -}}
{{- addf .Values.startup.baseSeconds (divf (include "dflash-serve.gigabytes" . | float64) .Values.startup.gigabytesPerSecond) | ceil | int -}}
{{- end -}}

{{- define "dflash-serve.probes" -}}
{{- $facts := include "dflash-serve.facts" . | fromYaml -}}
{{- $probes := (include "dflash-serve.engine" . | fromYaml).probes -}}
startupProbe:
  httpGet: {path: {{ $probes.started | quote }}, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ divf (include "dflash-serve.startupSeconds" . | float64) 10 | ceil | int }}
livenessProbe: # shallow: load never kills a server
  httpGet: {path: {{ $probes.live | quote }}, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  {{- if and .Values.readiness.acceptance $facts.speculates (include "dflash-serve.isKnown" .) (not .Values.half) }}
  exec:
    command:
      - python3
      - /etc/dflash-serve/ready.py
      - {{ printf "--backend=%s" .Values.backend | quote }}
      - {{ printf "--ready=%s" $probes.ready | quote }}
      - {{ printf "--model=%s" (include "dflash-serve.servedModel" .) | quote }}
      - --width={{ $facts.width }}
      {{- with .Values.secrets.apiKeys.name }}
      - --keys=/etc/dflash-serve-keys/keys
      {{- end }}
  {{- else }}
  httpGet: {path: {{ $probes.ready | quote }}, port: http}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 30
  failureThreshold: 3
lifecycle:
  preStop:
    sleep: {seconds: {{ .Values.drain.preStopSeconds }}}
{{- end -}}
