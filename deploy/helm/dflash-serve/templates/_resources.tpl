{{- /* CPUs and memory for each GPU, and the disk space of emptyDirs. */ -}}

{{- /* A quantity in bytes, as a whole number. */ -}}
{{- define "dflash-serve.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9]+" (toString .) | float64) (get $units (regexFind "[A-Za-z]*$" (toString .))) | int64 -}}
{{- end -}}

{{- define "dflash-serve.cpu" -}}
{{- .Values.resources.cpu | default (mul 8 (max 1 (include "dflash-serve.facts" . | fromYaml).gpusPerPod)) -}}
{{- end -}}

{{- define "dflash-serve.memory" -}}
{{- $host := ternary .Values.pair.decodeHostGi 0 (eq (.Values.half | default "") "decode") | int -}}
{{- .Values.resources.memory | default (printf "%dGi" (add $host (mul 64 (max 1 (include "dflash-serve.facts" . | fromYaml).gpusPerPod)))) -}}
{{- end -}}

{{- /* Bytes that a pod's emptyDirs may use: without a request for them, a full disk would evict the pod. */ -}}
{{- define "dflash-serve.diskBytes" -}}
{{- $each := include "dflash-serve.bytes" .Values.scratch | int64 -}}
{{- $scratch := mul $each (eq .Values.cache.kind "emptyDir" | ternary 3 2) -}}
{{- add $scratch (eq .Values.models.kind "emptyDir" | ternary (include "dflash-serve.bytes" .Values.models.size | int64) 0) -}}
{{- end -}}

{{- /* dict "cpu" c "memory" m "gpus" n, and of servers "disk" bytes "extra" dict "domain" bool */ -}}
{{- define "dflash-serve.resources" -}}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memory }}
  {{- with .disk }}
  ephemeral-storage: {{ . | quote }}
  {{- end }}
limits:
  memory: {{ .memory }}
  {{- with .gpus }}
  nvidia.com/gpu: {{ . | quote }}
  {{- end }}
  {{- range $name, $amount := .extra }}
  {{ $name }}: {{ $amount | quote }}
  {{- end }}
{{- if .domain }}
claims: [{name: compute-domain}]
{{- end }}
{{- end -}}
