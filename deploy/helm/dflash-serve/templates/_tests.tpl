{{- /* A pod that sends a request to the Service and ends. dict "root" $ "name" n "command" list "deadline" seconds */ -}}
{{- define "dflash-serve.testPod" -}}
{{- $root := .root -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ printf "%s-test-%s" (include "dflash-serve.fullname" $root) .name | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "dflash-serve.labels" $root | nindent 4 }}
    app.kubernetes.io/component: test
  annotations:
    helm.sh/hook: test # the pod stays until the next test: helm 3 reads the logs of --logs after it would be deleted
    helm.sh/hook-delete-policy: before-hook-creation
spec:
  {{- include "dflash-serve.testSpec" . | nindent 2 }}
{{- end -}}

{{- /* A test of `helm test` and, if it has a schedule, a CronJob with the same command. Arguments of testPod, and "schedule" text */ -}}
{{- define "dflash-serve.gate" -}}
{{- include "dflash-serve.testPod" . }}
{{- if .schedule }}
---
apiVersion: batch/v1
kind: CronJob
metadata:
  {{- include "dflash-serve.metadata" (dict "root" .root "suffix" (printf "-%s" .name)) | nindent 2 }}
spec:
  schedule: {{ .schedule | quote }}
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 300
  successfulJobsHistoryLimit: 1
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      backoffLimit: 0
      ttlSecondsAfterFinished: 86400 # the alert ends with it
      template:
        metadata:
          labels:
            {{- include "dflash-serve.selector" .root | nindent 12 }}
            app.kubernetes.io/component: test
        spec:
          {{- include "dflash-serve.testSpec" . | nindent 10 }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.testSpec" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "dflash-serve.serviceAccount" $root | quote }}
{{ include "dflash-serve.podRights" $root }}
restartPolicy: Never
activeDeadlineSeconds: {{ .deadline }}
{{- with $root.Values.placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  podAffinity: # on a server's node, which has the image
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "dflash-serve.selector" $root | nindent 12 }}
            app.kubernetes.io/component: server
containers:
  - name: {{ .name }}
    image: {{ include "dflash-serve.image" $root.Values.image | quote }}
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
    configMap: {name: {{ include "dflash-serve.fullname" $root | quote }}}
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

{{- define "dflash-serve.acceptanceCommand" -}}
{{- $command := list "python3" "/etc/dflash-serve/acceptance.py" (printf "--url=%s" (include "dflash-serve.url" .)) (printf "--model=%s" (include "dflash-serve.servedModel" .)) (printf "--at-least=%v" .Values.tests.acceptance.atLeast) -}}
{{- if .Values.secrets.apiKeys.name }}{{ $command = append $command "--keys=/etc/dflash-serve-keys/keys" }}{{ end -}}
{{- $command | toJson -}}
{{- end -}}

{{- define "dflash-serve.verifyCommand" -}}
{{- $command := list "dflash-serve" "verify" (printf "--url=%s" (include "dflash-serve.url" .)) (printf "--without-url=%s" .Values.tests.verify.without) "--output=/tmp/report.json" -}}
{{- /* With whole blocks SGLang cannot count penalties and our plug-in refuses such requests; they are left out at any width. */ -}}
{{- if eq .Values.backend "sglang" }}{{ $command = append $command "--no-penalties" }}{{ end -}}
{{- if .Values.secrets.apiKeys.name }}{{ $command = append $command "--api-key-file=/etc/dflash-serve-keys/keys" }}{{ end -}}
{{- $command | toJson -}}
{{- end -}}
