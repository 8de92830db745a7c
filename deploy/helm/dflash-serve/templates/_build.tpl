{{- /* A build is named by all that it is made from: recipe, tools (the image), GPU. */ -}}
{{- define "dflash-serve.buildKey" -}}
{{- list (.Values.build.recipe | fromYaml) .Values.build.image.digest (include "dflash-serve.gpuKind" .) | toJson | sha256sum | trunc 12 -}}
{{- end -}}

{{- define "dflash-serve.buildFolder" -}}
/models/builds/{{ include "dflash-serve.buildKey" . }}
{{- end -}}

{{- /* Waits for the build, then holds every file against its manifest: a fault ends the pod with a line that names it. */ -}}
{{- define "dflash-serve.waitForBuild" -}}
- name: verify-build
  image: {{ include "dflash-serve.image" .Values.image }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [/bin/sh, -ec]
  args:
    - |
      until [ -f "$BUILD/manifest.json" ]; do echo "waiting for $BUILD"; sleep 10; done
      exec dflash-serve build /etc/dflash-serve/recipe.yaml --output "$BUILD" --verify
  env:
    - {name: BUILD, value: {{ include "dflash-serve.buildFolder" . }}}
    - {name: HOME, value: /cache}
  resources: # of itself; it runs before the server
    requests: {cpu: 500m, memory: 1Gi}
    limits: {cpu: "2", memory: 1Gi}
  securityContext:
    {{- include "dflash-serve.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
    - {name: models, mountPath: /models, readOnly: true}
    - {name: cache, mountPath: /cache}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
