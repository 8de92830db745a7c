{{- /* Jobs that fill the models' claim before any server starts: hooks of install and upgrade, and PreSync of Argo CD.

A server that waited for them in its pod would hold the GPUs that they need. What they read comes before them, by its
weight, and goes when all is done; a Job itself stays for a day, for its log. */ -}}

{{- define "dflash-serve.hasJobs" -}}
{{- ternary "yes" "" (or .Values.build.enabled .Values.models.download.enabled) -}}
{{- end -}}

{{- /* dict "root" $ "suffix" "-x" "weight" n "keep" bool */ -}}
{{- define "dflash-serve.hookMetadata" -}}
{{ include "dflash-serve.metadata" . }}
annotations:
  helm.sh/hook: pre-install,pre-upgrade
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation{{ .keep | ternary "" ",hook-succeeded" }}
{{- end -}}

{{- /* A Job's name, service account apart. */ -}}
{{- define "dflash-serve.jobAccount" -}}
{{- .Values.serviceAccount.create | ternary (printf "%s-jobs" (include "dflash-serve.fullname" .)) (.Values.serviceAccount.name | default "default") -}}
{{- end -}}

{{- /* dict "root" $ "name" n "image" reference "command" list "cpu" c "memory" m "gpus" n "deadline" seconds */ -}}
{{- define "dflash-serve.job" -}}
{{- $root := .root -}}
backoffLimit: 3 # a stopped Job resumes its work
activeDeadlineSeconds: {{ .deadline }}
ttlSecondsAfterFinished: 86400
template:
  metadata:
    labels:
      {{- include "dflash-serve.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
  spec:
    serviceAccountName: {{ include "dflash-serve.jobAccount" $root | quote }}
    {{- include "dflash-serve.podRights" $root | nindent 4 }}
    restartPolicy: Never
    {{- include "dflash-serve.placement" (dict "root" $root "gpus" .gpus "component" .name) | nindent 4 }}
    containers:
      - name: {{ .name }}
        image: {{ .image | quote }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        command: {{ toJson .command }}
        env:
          {{- include "dflash-serve.environment" (dict "root" $root "offline" false) | nindent 10 }}
        resources:
          {{- include "dflash-serve.resources" (dict "cpu" .cpu "memory" .memory "gpus" .gpus) | nindent 10 }}
        securityContext:
          {{- include "dflash-serve.containerSecurity" $root | nindent 10 }}
        volumeMounts:
          - {name: config, mountPath: /etc/dflash-serve, readOnly: true}
          - {name: models, mountPath: /models}
          {{- if $root.Values.secrets.huggingFaceToken.name }}
          - {name: hub, mountPath: /etc/dflash-serve-hub, readOnly: true}
          {{- end }}
          - {name: cache, mountPath: /cache}
          - {name: prepared, mountPath: /prepared}
          - {name: tmp, mountPath: /tmp}
    volumes:
      - name: config
        configMap: {name: {{ printf "%s-jobs" (include "dflash-serve.fullname" $root) | quote }}}
      {{- include "dflash-serve.modelVolume" $root | nindent 6 }}
      {{- include "dflash-serve.tokenVolume" $root | nindent 6 }}
      {{- range list "cache" "prepared" "tmp" }}
      - name: {{ . }}
        emptyDir: {sizeLimit: {{ $root.Values.scratch }}}
      {{- end }}
{{- end -}}
