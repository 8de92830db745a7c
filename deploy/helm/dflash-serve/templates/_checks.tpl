{{- /* Arguments of files/check.py, which checks the node and its volumes before an engine starts. */ -}}
{{- define "dflash-serve.nodeChecks" -}}
{{- $found := list -}}
{{- if and .Values.security.checkMemlock (gt ((include "dflash-serve.facts" . | fromYaml).nodes | int) 1) }}{{ $found = append $found "--memlock" }}{{ end -}}
{{- if and (has .Values.models.kind (list "volume" "claim" "node")) (not .Values.models.download.enabled) }}{{ $found = append $found "--writable=/models" }}{{ end -}}
{{- if ne .Values.cache.kind "emptyDir" }}{{ $found = append $found "--writable=/cache" }}{{ end -}}
{{- with .Values.models.encodings }}{{ $found = append $found (printf "--file=%s/o200k_base.tiktoken" .) }}{{ end -}}
{{- $found | toJson -}}
{{- end -}}

{{- define "dflash-serve.checkNode" -}}
- name: check-node
  image: {{ include "dflash-serve.image" .Values.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python3, /etc/dflash-serve/check.py]
  args: {{ include "dflash-serve.nodeChecks" . }}
  {{- include "dflash-serve.smallContainer" . | nindent 2 }}
  volumeMounts:
    - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
    - {name: models, mountPath: /models{{ eq .Values.models.kind "image" | ternary ", readOnly: true" "" }}}
    - {{ include "dflash-serve.cacheMount" . }}
{{- end -}}

{{- /* Resources and rights of a container that runs before the server. */ -}}
{{- define "dflash-serve.smallContainer" -}}
resources: # of itself; it runs before the server
  requests: {cpu: 500m, memory: 1Gi}
  limits: {cpu: "2", memory: 1Gi}
securityContext:
  {{- include "dflash-serve.containerSecurity" . | nindent 2 }}
{{- end -}}
