{{- /* Parts that the pods of servers, Jobs and tests share. */ -}}

{{- define "dflash-serve.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.user }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch # not file by file over terabytes of weights
{{- with .Values.security.supplementalGroups }}
supplementalGroups: {{ toJson . }}
{{- end }}
{{- with .Values.security.seccompProfile }}
seccompProfile: {type: Localhost, localhostProfile: {{ . | quote }}}
{{- else }}
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- end -}}

{{- define "dflash-serve.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .Values.security.capabilities }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "dflash-serve.podRights" -}}
automountServiceAccountToken: false
enableServiceLinks: false # Kubernetes' DFLASH_SERVE_* variables would be read as settings
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "dflash-serve.podSecurity" . | nindent 2 }}
{{- end -}}

{{- /* HF_HUB_OFFLINE is set if a Job or an image brings the models. dict "root" $ "offline" bool */ -}}
{{- define "dflash-serve.environment" -}}
{{- $root := .root -}}
- {name: HOME, value: /cache}
- {name: USER, value: dflash} # libraries look the user's name up, and 10001 may have none
- {name: XDG_CACHE_HOME, value: /cache}
- {name: HF_HOME, value: /models/huggingface}
- {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
{{- range $name, $value := (include "dflash-serve.engine" $root | fromYaml).environment }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- if .offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: HF_MODULES_CACHE, value: /cache/modules} # a model's own code is copied there; /models is read-only
{{- end }}
{{- with $root.Values.models.encodings }}
- {name: TIKTOKEN_ENCODINGS_BASE, value: {{ . | quote }}}
{{- end }}
{{- if $root.Values.secrets.huggingFaceToken.name }}
- {name: HF_TOKEN_PATH, value: /etc/dflash-serve-hub/token}
{{- end }}
{{- end -}}

{{- /* Kind "models": a folder on the weights' volume for each image, because one image may not read another's kernels. */ -}}
{{- define "dflash-serve.cacheMount" -}}
{{- if eq .Values.cache.kind "models" -}}
{name: models, mountPath: /cache, subPath: cache/{{ .Values.image.digest | trimPrefix "sha256:" | trunc 12 }}}
{{- else -}}
{name: cache, mountPath: /cache}
{{- end -}}
{{- end -}}

{{- define "dflash-serve.writable" -}}
{{- if eq .Values.cache.kind "node" }}
- name: cache
  hostPath: {path: {{ .Values.cache.path | quote }}, type: Directory}
{{- else if eq .Values.cache.kind "emptyDir" }}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.scratch }}}
{{- end }}
{{- range list "prepared" "tmp" }}
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
  {{- else if eq .kind "node" }}
  hostPath: {path: {{ .path | quote }}, type: Directory}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ .claim | default (printf "%s-models" (include "dflash-serve.fullname" $)) | quote }}}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "dflash-serve.tokenVolume" -}}
{{- with .Values.secrets.huggingFaceToken }}
{{- if .name }}
- name: hub
  secret: {secretName: {{ .name | quote }}, defaultMode: 0440, items: [{key: {{ .key | quote }}, path: token}]}
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.keysVolume" -}}
{{- with .Values.secrets.apiKeys }}
{{- if .name }}
- name: keys
  secret: {secretName: {{ .name | quote }}, defaultMode: 0440, items: [{key: {{ .key | quote }}, path: keys}]}
{{- end }}
{{- end }}
{{- end -}}
