{{- /* What a schema cannot say. Every problem is a line: where: what; do. All are shown at once. */ -}}
{{- define "dflash-serve.validate" -}}
{{- $found := list -}}
{{- range $part := list "engine" "image" "models" "devices" "nodes" "speculation" "limits" "placement" "replicas" "lifetime" "build" "doors" "environment" "tests" -}}
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

{{- define "dflash-serve.problems.tests" -}}
{{- with .Values.tests.verify }}
{{- if and .enabled (not (get $.Values.deployment "drafter")) }}
tests.verify.enabled: there is no speculation to verify; name a drafter
{{- end }}
{{- if and .enabled (not (regexMatch "^https?://" .without)) }}
tests.verify.without: {{ .without | quote }} is no address; give the server that speculates not, such as http://plain.serving
{{- end }}
{{- if and .without (not .enabled) }}
tests.verify.without: would be ignored; set tests.verify.enabled
{{- end }}
{{- end }}
{{- end -}}
