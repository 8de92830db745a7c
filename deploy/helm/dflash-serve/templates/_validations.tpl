{{- /* What a schema cannot say. Every problem is a line: where: what; do. All are shown at once. */ -}}
{{- define "dflash-serve.validate" -}}
{{- $found := list -}}
{{- range $part := list "engine" "arguments" "image" "models" "devices" "nodes" "speculation" "limits" "placement" "replicas" "lifetime" "build" "doors" "routes" "environment" "tests" -}}
  {{- range include (printf "dflash-serve.problems.%s" $part) $ | trim | splitList "\n" -}}
    {{- if trim . -}}{{- $found = append $found (trim .) -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- if $found -}}
  {{- fail (printf "\n\n  %s\n" (join "\n  " $found)) -}}
{{- end -}}
{{- end -}}

{{- define "dflash-serve.isDigest" -}}
{{- ternary "yes" "" (regexMatch "^sha256:[0-9a-f]{64}$" .) -}}
{{- end -}}

{{- define "dflash-serve.isQuantity" -}}
{{- ternary "yes" "" (regexMatch "^[1-9][0-9]*([kMGT]|[KMGT]i)?$" (toString .)) -}}
{{- end -}}

{{- define "dflash-serve.problems.routes" -}}
{{- $pool := .Values.inferencePool }}
{{- if and $pool.enabled (not $pool.endpointPicker) }}
inferencePool.endpointPicker: none; name the Service of your endpoint picker
{{- end }}
{{- if and $pool.endpointPicker (not $pool.enabled) }}
inferencePool.endpointPicker: would be ignored; set inferencePool.enabled
{{- end }}
{{- with .Values.route }}
{{- if ne .enabled (ne .gateway "") }}
route.gateway: {{ .gateway | quote }} with route.enabled {{ .enabled }}; a route needs the name of its Gateway, and a name without a route is ignored
{{- end }}
{{- if and .canary.service (not .enabled) }}
route.canary.service: would be ignored; set route.enabled
{{- end }}
{{- if and .canary.weight (not .canary.service) }}
route.canary.weight: {{ .canary.weight }} percent of the requests for nobody; name route.canary.service
{{- end }}
{{- if and .canary.service (eq .canary.service (include "dflash-serve.fullname" $)) }}
route.canary.service: {{ .canary.service }} is this release's own; name the other one's
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.tests" -}}
{{- with .Values.tests.acceptance }}
{{- if and .schedule (not .atLeast) }}
tests.acceptance.schedule: would be ignored; set tests.acceptance.atLeast
{{- end }}
{{- if .atLeast }}
{{- if not (include "dflash-serve.facts" $ | fromYaml).speculates }}
tests.acceptance.atLeast: there is no speculation to measure; name a drafter, or leave it out
{{- end }}
{{- if gt (include "dflash-serve.maxReplicas" $ | int) 1 }}
tests.acceptance.atLeast: any of {{ include "dflash-serve.maxReplicas" $ }} replicas would answer, and one be measured; ask a release of one replica, such as the canary
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.tests.verify }}
{{- if and .enabled (not (get $.Values.deployment "drafter")) }}
tests.verify.enabled: there is no speculation to verify; name a drafter
{{- end }}
{{- if and .enabled (not (regexMatch "^https?://" .without)) }}
tests.verify.without: {{ .without | quote }} is no address; give the server that speculates not, such as http://plain.serving
{{- end }}
{{- range $key := list "without" "schedule" }}
{{- if and (get $.Values.tests.verify $key) (not $.Values.tests.verify.enabled) }}
tests.verify.{{ $key }}: would be ignored; set tests.verify.enabled
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
