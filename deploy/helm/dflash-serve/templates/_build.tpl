{{- /* A build is named by all that it is made from: recipe, tools (the image), GPU. */ -}}
{{- define "dflash-serve.buildKey" -}}
{{- list (.Values.build.recipe | fromYaml) .Values.build.image.digest (include "dflash-serve.gpuKind" .) | toJson | sha256sum | trunc 12 -}}
{{- end -}}

{{- define "dflash-serve.buildFolder" -}}
/models/builds/{{ include "dflash-serve.buildKey" . }}
{{- end -}}

{{- /* Holds every file of the build, which a hook has made, against its manifest: a fault ends the pod with a line. */ -}}
{{- define "dflash-serve.verifyBuild" -}}
- name: verify-build
  image: {{ include "dflash-serve.image" .Values.image }}
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
