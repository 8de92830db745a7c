{{- /* dict "root" $ "component" "server" or "worker": workers of a group have no server of their own to ask. */ -}}
{{- define "dflash-serve.podTemplate" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $facts := include "dflash-serve.facts" $root | fromYaml -}}
metadata:
  labels:
    {{- include "dflash-serve.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: server
    dflash-serve/config: {{ include "dflash-serve.config" $root | sha256sum }} # a changed deployment is a new pod
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "dflash-serve.podBasics" $root | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "dflash-serve.graceSeconds" $root }}
  {{- include "dflash-serve.placement" (dict "root" $root "gpus" $facts.gpusPerPod "component" .component) | nindent 2 }}
  {{- if $values.build.enabled }}
  initContainers:
    {{- include "dflash-serve.waitForBuild" $root | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "dflash-serve.image" $values.image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [dflash-serve]
      args:
        {{- include "dflash-serve.arguments" $root | nindent 8 }}
      env:
        {{- include "dflash-serve.environment" $root | nindent 8 }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: 8000, protocol: TCP}
      {{- if eq .component "server" }}
      {{- include "dflash-serve.probes" $root | nindent 6 }}
      {{- end }}
      resources:
        {{- include "dflash-serve.resources" (dict "values" $values.resources "gpus" $facts.gpusPerPod) | nindent 8 }}
      securityContext:
        {{- include "dflash-serve.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
        - {name: models, mountPath: /models{{ eq $values.models.kind "image" | ternary ", readOnly: true" "" }}}
        {{- if $values.build.enabled }}
        - {name: models, mountPath: /build, subPath: builds/{{ include "dflash-serve.buildKey" $root }}, readOnly: true}
        {{- end }}
        {{- if $values.secrets.huggingFaceToken.name }}
        - {name: hub, mountPath: /etc/dflash-serve-hub, readOnly: true}
        {{- end }}
        {{- if $values.secrets.apiKeys.name }}
        - {name: keys, mountPath: /etc/dflash-serve-keys, readOnly: true}
        {{- end }}
        - {name: cache, mountPath: /cache}
        - {name: prepared, mountPath: /prepared}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: config
      configMap: {name: {{ include "dflash-serve.fullname" $root }}}
    {{- include "dflash-serve.modelVolume" $root | nindent 4 }}
    {{- include "dflash-serve.tokenVolume" $root | nindent 4 }}
    {{- with $values.secrets.apiKeys }}
    {{- if .name }}
    - name: keys
      secret: {secretName: {{ .name }}, defaultMode: 0440, items: [{key: {{ .key }}, path: keys}]}
    {{- end }}
    {{- end }}
    {{- include "dflash-serve.writable" $root | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
{{- end -}}

{{- define "dflash-serve.arguments" -}}
- serve
- /etc/dflash-serve/deployment.yaml
- --backend={{ .Values.backend }}
- --host=0.0.0.0
- --port=8000
- --folder=/prepared
{{- if has "drain-seconds" (include "dflash-serve.engine" . | fromYaml).serverFlags }}
- --drain-seconds={{ .Values.drain.seconds }}
{{- end }}
{{- if .Values.secrets.apiKeys.name }}
- --api-key-file=/etc/dflash-serve-keys/keys
{{- end }}
{{- end -}}
