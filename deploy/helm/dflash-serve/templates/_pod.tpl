{{- /* dict "root" $ "component" "server", "worker" (of a group: no HTTP server, so no probes), or "certify" (of a Job) */ -}}
{{- define "dflash-serve.podTemplate" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $facts := include "dflash-serve.facts" $root | fromYaml -}}
{{- $job := eq .component "certify" -}}
metadata:
  labels: # without the chart's version: a new chart restarts no engine
    {{- include "dflash-serve.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- include "dflash-serve.halfLabel" $root | nindent 4 }}
    {{- if $values.half }}
    llm-d.ai/variant: {{ printf "%s-%s" (include "dflash-serve.fullname" $root) $values.half | quote }}
    {{- end }}
    {{- if not $job }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: server
    dflash-serve/config: {{ include "dflash-serve.serverConfig" $root | sha256sum }} # a changed deployment is a new pod
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if eq ($values.half | default "") "prefill" }}
    {{- with (include "dflash-serve.engine" $root | fromYaml).prefillAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- end }}
spec:
  serviceAccountName: {{ include ($job | ternary "dflash-serve.jobAccount" "dflash-serve.serviceAccount") $root | quote }}
  {{- include "dflash-serve.podRights" $root | nindent 2 }}
  {{- if $job }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ include "dflash-serve.graceSeconds" $root }}
  {{- if $values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "dflash-serve.placement" (dict "root" $root "gpus" $facts.gpusPerPod "component" .component) | nindent 2 }}
  {{- if $values.placement.computeDomain }}
  resourceClaims:
    - {name: compute-domain, resourceClaimTemplateName: {{ printf "%s-domain" (include "dflash-serve.fullname" $root) | quote }}}
  {{- end }}
  {{- $checks := ne (include "dflash-serve.nodeChecks" $root) "[]" }}
  {{- if or $checks $values.build.enabled $values.initContainers }}
  initContainers:
    {{- if $checks }}
    {{- include "dflash-serve.checkNode" $root | nindent 4 }}
    {{- end }}
    {{- if $values.build.enabled }}
    {{- include "dflash-serve.verifyBuild" $root | nindent 4 }}
    {{- end }}
    {{- with $values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - {{- include "dflash-serve.serverContainer" (dict "root" $root "component" .component "facts" $facts) | nindent 6 }}
  volumes:
    - name: config
      configMap: {name: {{ printf "%s%s" (include "dflash-serve.fullname" $root) ($job | ternary "-jobs" "") | quote }}}
    {{- include "dflash-serve.modelVolume" $root | nindent 4 }}
    {{- include "dflash-serve.tokenVolume" $root | nindent 4 }}
    {{- include "dflash-serve.keysVolume" $root | nindent 4 }}
    {{- include "dflash-serve.writable" $root | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- /* dict "root" $ "component" c "facts" dict */ -}}
{{- define "dflash-serve.serverContainer" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $job := eq .component "certify" -}}
name: {{ $job | ternary "certify" "server" }}
image: {{ include "dflash-serve.image" $values.image | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
{{- if $job }}
{{- include "dflash-serve.certifyCommand" $root | nindent 0 }}
{{- else }}
command: [dflash-serve]
args:
  {{- include "dflash-serve.arguments" $root | nindent 2 }}
{{- end }}
env:
  {{- $offline := or (eq $values.models.kind "image") $values.models.download.enabled }}
  {{- include "dflash-serve.environment" (dict "root" $root "offline" $offline) | nindent 2 }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if not $job }}
ports:
  - {name: http, containerPort: 8000, protocol: TCP}
{{- end }}
{{- if eq .component "server" }}
{{- include "dflash-serve.probes" $root | nindent 0 }}
{{- end }}
resources:
  {{- $disk := include "dflash-serve.diskBytes" $root }}
  {{- include "dflash-serve.resources" (dict "cpu" (include "dflash-serve.cpu" $root) "memory" (include "dflash-serve.memory" $root) "gpus" .facts.gpusPerPod "disk" $disk "extra" $values.resources.extra "domain" $values.placement.computeDomain) | nindent 2 }}
securityContext:
  {{- include "dflash-serve.containerSecurity" $root | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
  - {name: models, mountPath: /models{{ or (eq $values.models.kind "image") (and $values.models.download.enabled (not $job)) | ternary ", readOnly: true" "" }}}
  {{- if $values.build.enabled }}
  - {name: models, mountPath: /build, subPath: builds/{{ include "dflash-serve.buildKey" $root }}, readOnly: true}
  {{- end }}
  {{- if $values.secrets.huggingFaceToken.name }}
  - {name: hub, mountPath: /etc/dflash-serve-hub, readOnly: true}
  {{- end }}
  {{- if $values.secrets.apiKeys.name }}
  - {name: keys, mountPath: /etc/dflash-serve-keys, readOnly: true}
  {{- end }}
  - {{ include "dflash-serve.cacheMount" $root }}
  - {name: prepared, mountPath: /prepared}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "dflash-serve.arguments" -}}
- serve
- /etc/dflash-serve/deployment.yaml
- {{ printf "--backend=%s" .Values.backend | quote }}
- --host=0.0.0.0
- --port=8000
- --folder=/prepared
{{- with .Values.half }}
- --role={{ . }}
{{- end }}
{{- if has "drain-seconds" (include "dflash-serve.engine" . | fromYaml).serverFlags }}
- --drain-seconds={{ .Values.drain.seconds }}
{{- end }}
{{- if .Values.secrets.apiKeys.name }}
- --api-key-file=/etc/dflash-serve-keys/keys
{{- end }}
{{- if eq .Values.backend "vllm" }}
- -- # vLLM's own flag; without it SIGTERM aborts every answer
- --shutdown-timeout={{ .Values.drain.seconds }}
{{- end }}
{{- end -}}
