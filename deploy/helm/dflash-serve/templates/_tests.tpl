{{- /* A pod that asks the Service, and its end. dict "root" $ "name" n "command" list "deadline" seconds */ -}}
{{- define "dflash-serve.testPod" -}}
{{- $root := .root -}}
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
  {{- include "dflash-serve.testSpec" . | nindent 2 }}
{{- end -}}

{{- define "dflash-serve.testSpec" -}}
{{- $root := .root -}}
{{- include "dflash-serve.podBasics" $root }}
restartPolicy: Never
activeDeadlineSeconds: {{ .deadline }}
{{- with $root.Values.placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  podAffinity: # beside a server, where the image is
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "dflash-serve.selector" $root | nindent 12 }}
            app.kubernetes.io/component: server
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
      {{- include "dflash-serve.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      {{- if $root.Values.secrets.apiKeys.name }}
      - {name: keys, mountPath: /etc/dflash-serve-keys, readOnly: true}
      {{- end }}
volumes:
  - name: config
    configMap: {name: {{ include "dflash-serve.fullname" $root }}}
  - {name: cache, emptyDir: {sizeLimit: 1Gi}}
  - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
  {{- include "dflash-serve.keysVolume" $root | nindent 2 }}
{{- end -}}

{{- define "dflash-serve.url" -}}
http://{{ include "dflash-serve.fullname" . }}.{{ .Release.Namespace }}:{{ .Values.service.port }}
{{- end -}}

{{- define "dflash-serve.askCommand" -}}
{{- $command := list "python3" "/etc/dflash-serve/ask.py" (printf "--url=%s" (include "dflash-serve.url" .)) (printf "--model=%s" (include "dflash-serve.servedModel" .)) -}}
{{- if .Values.secrets.apiKeys.name }}{{ $command = append $command "--keys=/etc/dflash-serve-keys/keys" }}{{ end -}}
{{- $command | toJson -}}
{{- end -}}
