{{- /* Images, weights, and what is built of them. */ -}}

{{- define "dflash-serve.problems.image" -}}
{{- $images := dict "image" .Values.image }}
{{- if .Values.build.enabled }}{{- $_ := set $images "build.image" .Values.build.image }}{{- end }}
{{- range $where, $image := $images }}
{{- if not $image.repository }}
{{ $where }}.repository: no image; build one of deploy/docker and name it
{{- else if or (contains "@" $image.repository) (contains ":" (base $image.repository)) }}
{{ $where }}.repository: {{ $image.repository | quote }} has a tag or digest; give the name alone, and {{ $where }}.digest
{{- end }}
{{- if not (include "dflash-serve.isDigest" $image.digest) }}
{{ $where }}.digest: {{ $image.digest | quote }} pins nothing; give sha256: and 64 hexadecimal digits (docker buildx imagetools inspect IMAGE)
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.models" -}}
{{- with .Values.models }}
{{- if and (eq .kind "claim") (not .claim) }}
models.claim: kind is claim, but none is named; name a PersistentVolumeClaim of this namespace
{{- end }}
{{- if and .claim (ne .kind "claim") }}
models.claim: {{ .claim | quote }} would be ignored; set models.kind to claim, or leave it out
{{- end }}
{{- if and .image (ne .kind "image") }}
models.image: {{ .image | quote }} would be ignored; set models.kind to image, or leave it out
{{- end }}
{{- if and .storageClassName (ne .kind "volume") }}
models.storageClassName: {{ .storageClassName | quote }} would be ignored; set models.kind to volume, or leave it out
{{- end }}
{{- if and (has .kind (list "emptyDir" "volume")) (not (include "dflash-serve.isQuantity" .size)) }}
models.size: {{ .size | quote }} is no size; write one such as 500Gi
{{- end }}
{{- if eq .kind "image" }}
{{- if not (and (contains "@" .image) (include "dflash-serve.isDigest" (splitList "@" .image | last))) }}
models.image: {{ .image | quote }} pins nothing; give repository@sha256:<64 hexadecimal digits>
{{- end }}
{{- range $name := list "target" "drafter" }}
{{- $model := dig "model" "" (get $.Values.deployment $name | default dict) }}
{{- if and $model (not (hasPrefix "/models/" $model)) }}
deployment.{{ $name }}.model: {{ $model | quote }} would be fetched, but an image volume is read-only; name its folder below /models
{{- end }}
{{- end }}
{{- if not (semverCompare ">=1.33.0-0" $.Capabilities.KubeVersion.Version) }}
models.kind: image volumes came with Kubernetes 1.33, this is {{ $.Capabilities.KubeVersion.Version }}; use claim
{{- end }}
{{- end }}
{{- $facts := include "dflash-serve.facts" $ | fromYaml }}
{{- $pods := mul (include "dflash-serve.maxReplicas" $) $facts.nodes }}
{{- if and (has .kind (list "volume" "claim")) (has .accessMode (list "ReadWriteOnce" "ReadWriteOncePod")) (gt $pods 1) }}
models.accessMode: {{ .accessMode }} serves one node, but there may be {{ $pods }} pods; use ReadWriteMany, or models.kind emptyDir or image
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.build" -}}
{{- $recipe := .Values.build.recipe | fromYaml }}
{{- $built := list }}
{{- range $name := list "target" "drafter" }}
{{- $model := dig "model" "" (get $.Values.deployment $name | default dict) }}
{{- if hasPrefix "/build" $model }}{{- $built = append $built (printf "deployment.%s.model" $name) }}{{- end }}
{{- end }}
{{- if .Values.build.enabled }}
{{- if not (has .Values.models.kind (list "volume" "claim")) }}
models.kind: {{ .Values.models.kind }} cannot hold a build that outlives its Job; use volume or claim
{{- else if ne .Values.models.accessMode "ReadWriteMany" }}
models.accessMode: the build writes while servers wait, so {{ .Values.models.accessMode }} does not do; use ReadWriteMany
{{- end }}
{{- if not .Values.build.recipe }}
build.recipe: nothing to build; give a file: --set-file build.recipe=engines/recipes/qwen3-8b-b200.yaml
{{- else if hasKey $recipe "Error" }}
build.recipe: not valid YAML; give a file of engines/recipes by --set-file
{{- else if not (and (hasKey $recipe "deployment") (hasKey $recipe "build")) }}
build.recipe: no recipe, it needs `deployment` and `build`; give a file of engines/recipes by --set-file
{{- end }}
{{- if not $built }}
build.enabled: nothing of it is served; set deployment.drafter.model to /build/drafter-fp8, say, and its quantization to fp8
{{- end }}
{{- if lt (int .Values.build.deadlineSeconds) 60 }}
build.deadlineSeconds: no build ends within {{ .Values.build.deadlineSeconds }} s; use 60 or more
{{- end }}
{{- else }}
{{- range $built }}
{{ . }}: below /build, but nothing is built; set build.enabled
{{- end }}
{{- if .Values.build.recipe }}
build.recipe: would be ignored; set build.enabled, or leave it out
{{- end }}
{{- end }}
{{- end -}}
