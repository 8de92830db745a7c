{{- /* What servers, the build and tests have in common. */ -}}

{{- define "dflash-serve.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch # not file by file over terabytes of weights
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "dflash-serve.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "dflash-serve.podBasics" -}}
serviceAccountName: {{ include "dflash-serve.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false # its variables, DFLASH_SERVE_*, would pass for our settings
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "dflash-serve.podSecurity" . | nindent 2 }}
{{- end -}}

{{- define "dflash-serve.environment" -}}
- {name: HOME, value: /cache}
- {name: USER, value: dflash} # libraries ask who they are, and 10001 may have no name
- {name: XDG_CACHE_HOME, value: /cache}
- {name: HF_HOME, value: /models/huggingface}
- {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
{{- range $name, $value := (include "dflash-serve.engine" . | fromYaml).environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- if eq .Values.models.kind "image" }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if .Values.secrets.huggingFaceToken.name }}
- {name: HF_TOKEN_PATH, value: /etc/dflash-serve-hub/token}
{{- end }}
{{- end -}}

{{- define "dflash-serve.writable" -}}
{{- range list "cache" "prepared" "tmp" }}
- name: {{ . }}
  emptyDir: {sizeLimit: {{ $.Values.scratch }}}
{{- end }}
{{- end -}}

{{- define "dflash-serve.modelVolume" -}}
- name: models
  {{- with .Values.models }}
  {{- if eq .kind "emptyDir" }}
  emptyDir: {sizeLimit: {{ .size }}}
  {{- else if eq .kind "image" }}
  image: {reference: {{ .image | quote }}, pullPolicy: IfNotPresent}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ .claim | default (printf "%s-models" (include "dflash-serve.fullname" $)) }}}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "dflash-serve.tokenVolume" -}}
{{- with .Values.secrets.huggingFaceToken }}
{{- if .name }}
- name: hub
  secret: {secretName: {{ .name }}, defaultMode: 0440, items: [{key: {{ .key }}, path: token}]}
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.resources" -}}
requests:
  cpu: {{ .values.cpu | quote }}
  memory: {{ .values.memory }}
limits:
  cpu: {{ .values.cpu | quote }}
  memory: {{ .values.memory }}
  {{- with .gpus }}
  nvidia.com/gpu: {{ . | quote }}
  {{- end }}
  {{- range $name, $amount := .values.extra }}
  {{ $name }}: {{ $amount | quote }}
  {{- end }}
{{- end -}}
