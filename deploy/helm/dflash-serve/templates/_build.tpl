{{- /* The key of a build is a digest of its inputs: recipe, tools (the image) and GPU. */ -}}
{{- define "dflash-serve.buildKey" -}}
{{- list (.Values.build.recipe | fromYaml) .Values.build.image.digest (include "dflash-serve.gpuKind" .) | toJson | sha256sum | trunc 12 -}}
{{- end -}}

{{- define "dflash-serve.buildFolder" -}}
/models/builds/{{ include "dflash-serve.buildKey" . }}
{{- end -}}

{{- /* Compares every file of the build with its manifest; a difference ends the pod with one line. */ -}}
{{- define "dflash-serve.verifyBuild" -}}
- name: verify-build
  image: {{ include "dflash-serve.image" .Values.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [timeout, {{ include "dflash-serve.startupSeconds" . | quote }}, dflash-serve, build]
  args: [/etc/dflash-serve/recipe.yaml, --output, {{ include "dflash-serve.buildFolder" . }}, --verify]
  env:
    - {name: HOME, value: /cache}
  {{- include "dflash-serve.smallContainer" . | nindent 2 }}
  volumeMounts:
    - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
    - {name: models, mountPath: /models, readOnly: true}
    - {{ include "dflash-serve.cacheMount" . }}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
