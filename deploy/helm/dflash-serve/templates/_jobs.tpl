{{- /* Jobs that come before any server: hooks of install and upgrade, and PreSync of Argo CD. Two fill the models' claim,
the last one certifies the deployment.

A server that waited for them in its pod would hold the GPUs that they need. What they read comes before them, by its
weight, and goes when all is done; a Job itself stays for a day, for its log. */ -}}

{{- define "dflash-serve.hasJobs" -}}
{{- ternary "yes" "" (or .Values.build.enabled .Values.models.download.enabled .Values.certify.enabled) -}}
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

{{- /* What a certificate is valid for: deployment, image, GPU and settings. */ -}}
{{- define "dflash-serve.certifyKey" -}}
{{- list .Values.deployment .Values.image.digest .Values.certify (include "dflash-serve.gpuKind" .) | toJson | sha256sum | trunc 12 -}}
{{- end -}}

{{- /* "yes" unless the release that runs was certified with the same key: a change of replicas needs no spare GPUs. */ -}}
{{- define "dflash-serve.certifies" -}}
{{- $running := lookup "v1" "ConfigMap" .Release.Namespace (include "dflash-serve.fullname" .) -}}
{{- $certified := dig "metadata" "annotations" "dflash-serve/certified" "" $running -}}
{{- ternary "yes" "" (and .Values.certify.enabled (ne $certified (include "dflash-serve.certifyKey" .))) -}}
{{- end -}}

{{- /* The Job's pod certifies nothing again that was accepted, and goes on with a run that was interrupted. Without a claim
or a folder of the node the certificate is in the log, as JSON. */ -}}
{{- define "dflash-serve.certifyCommand" -}}
{{- $kept := has .Values.models.kind (list "claim" "node") -}}
command:
  - sh
  - -c
  - |
    grep -qs '"verdict": "accepted"' "$0/certificate.json" && { echo "accepted before: $0"; exit 0; }
    test -e "$0/certificate.json.partial.jsonl" && set -- "$@" --resume
    exec dflash-serve certify "$@" --output "$0"
  - {{ printf "%s/%s-%s" ($kept | ternary "/models/certificates" "/tmp") (include "dflash-serve.fullname" .) (include "dflash-serve.certifyKey" .) }}
args:
  - /etc/dflash-serve/deployment.yaml
  - {{ printf "--backend=%s" .Values.backend | quote }}
  - --minutes={{ .Values.certify.minutes }}
  - --concurrency={{ .Values.certify.concurrency }}
  {{- with .Values.certify.dataset }}
  - {{ printf "--dataset=%s" . | quote }}
  {{- end }}
  {{- if not $kept }}
  - --json
  {{- end }}
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
          {{- with $root.Values.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
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
          {{- with $root.Values.extraVolumeMounts }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    volumes:
      - name: config
        configMap: {name: {{ printf "%s-jobs" (include "dflash-serve.fullname" $root) | quote }}}
      {{- include "dflash-serve.modelVolume" $root | nindent 6 }}
      {{- include "dflash-serve.tokenVolume" $root | nindent 6 }}
      {{- range list "cache" "prepared" "tmp" }}
      - name: {{ . }}
        emptyDir: {sizeLimit: {{ $root.Values.scratch }}}
      {{- end }}
      {{- with $root.Values.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}
