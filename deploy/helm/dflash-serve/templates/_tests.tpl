{{- /* A pod that asks the Service. dict "root" $ "name" n "command" list */ -}}
{{- define "dflash-serve.testPod" -}}
{{- $root := .root -}}
{{- $keys := $root.Values.secrets.apiKeys -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "dflash-serve.fullname" $root }}-test-{{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "dflash-serve.labels" $root | nindent 4 }}
    app.kubernetes.io/component: test
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  {{- include "dflash-serve.podBasics" $root | nindent 2 }}
  restartPolicy: Never
  {{- with $root.Values.placement.tolerations }}
  tolerations: # the image is there already
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ include "dflash-serve.image" $root.Values.image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ .command | toJson }}
      env:
        - {name: HOME, value: /cache}
      resources:
        requests: {cpu: 100m, memory: 512Mi}
        limits: {cpu: "1", memory: 2Gi}
      securityContext:
        {{- include "dflash-serve.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        {{- if $keys.name }}
        - {name: keys, mountPath: /etc/dflash-serve-keys, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "dflash-serve.fullname" $root }}}
    - {name: cache, emptyDir: {sizeLimit: 1Gi}}
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    {{- if $keys.name }}
    - name: keys
      secret: {secretName: {{ $keys.name }}, defaultMode: 0440, items: [{key: {{ $keys.key }}, path: keys}]}
    {{- end }}
{{- end -}}

{{- define "dflash-serve.url" -}}
http://{{ include "dflash-serve.fullname" . }}.{{ .Release.Namespace }}:{{ .Values.service.port }}
{{- end -}}

{{- define "dflash-serve.askCommand" -}}
{{- $command := list "python3" "/etc/dflash-serve/ask.py" (printf "--url=%s" (include "dflash-serve.url" .)) (printf "--model=%s" (include "dflash-serve.model" .)) -}}
{{- if .Values.secrets.apiKeys.name }}{{ $command = append $command "--keys=/etc/dflash-serve-keys/keys" }}{{ end -}}
{{- $command | toJson -}}
{{- end -}}
