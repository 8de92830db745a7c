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
{{- if and (has .kind (list "emptyDir" "volume")) (include "dflash-serve.isQuantity" .size) $.Values.startup.gigabytes }}
{{- if lt (include "dflash-serve.bytes" .size | float64) (mulf $.Values.startup.gigabytes 1000000000) }}
models.size: {{ .size }} does not hold {{ $.Values.startup.gigabytes }} GB of weights (startup.gigabytes); use {{ mulf $.Values.startup.gigabytes 1.1 | ceil }}G or more
{{- end }}
{{- end }}
{{- if ne (eq .kind "node") (hasPrefix "/" .path) }}
models.path: {{ .path | quote }} and kind {{ .kind }} do not go together; a folder of the node, such as /raid/models, belongs to kind node
{{- end }}
{{- if ne (eq $.Values.cache.kind "node") (hasPrefix "/" $.Values.cache.path) }}
cache.path: {{ $.Values.cache.path | quote }} and kind {{ $.Values.cache.kind }} do not go together; a folder of the node, such as /raid/cache, belongs to kind node
{{- end }}
{{- if and (eq $.Values.cache.kind "models") (not (has .kind (list "volume" "claim" "node"))) }}
cache.kind: models of kind {{ .kind }} keep nothing; use models.kind volume, claim or node, or cache.kind node
{{- end }}
{{- if and .encodings (not (hasPrefix "/models/" .encodings)) }}
models.encodings: {{ .encodings | quote }} is not below /models; name a folder there, such as /models/encodings
{{- end }}
{{- $target := dig "target" "model" "" $.Values.deployment }}
{{- if and (contains "gpt-oss" $target) (not .encodings) $.Values.networkPolicy.enabled (not $.Values.networkPolicy.egressPorts) }}
models.encodings: gpt-oss reads o200k_base.tiktoken, which it would fetch and networkPolicy.egressPorts forbids; name its folder below /models
{{- end }}
{{- if .download.enabled }}
{{- if ne .kind "claim" }}
models.download: weights have to be there before the release is, and models.kind is {{ .kind }}; make a claim yourself, and name it in models.claim
{{- end }}
{{- if lt (int .download.deadlineSeconds) 60 }}
models.download.deadlineSeconds: nothing is fetched within {{ .download.deadlineSeconds }} s; use 60 or more
{{- end }}
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
{{- if ne .Values.models.kind "claim" }}
models.kind: the build is made before the release is, and {{ .Values.models.kind }} comes with it; make a claim yourself, and name it in models.claim
{{- else if ne .Values.models.accessMode "ReadWriteMany" }}
models.accessMode: the build writes while servers of an earlier revision read, so {{ .Values.models.accessMode }} does not do; use ReadWriteMany
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
