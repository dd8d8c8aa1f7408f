{{/* Rules between values that "enginery.validate" collects. Each prints a line per mistake: what, which value, the remedy. */}}

{{/* Names of environment variables that the chart sets somewhere, as JSON. */}}
{{- define "enginery.ownVariables" -}}
{{- $texts := list (include "enginery.env.base" .) (include "enginery.env.registry" .) (include "enginery.env.prefect" .)
      (include "enginery.env.prefectWorker" .) -}}
{{- $names := list "ENGINERY_CACHE" -}}
{{- if .Values.ray.enabled }}{{ $texts = append $texts (include "enginery.env.ray" .) }}{{ $names = append $names "RAY_AUTH_TOKEN_PATH" }}{{ end -}}
{{- range $texts }}{{ range fromYamlArray . }}{{ $names = append $names .name }}{{ end }}{{ end -}}
{{- toJson $names -}}
{{- end -}}

{{/* Of a list of environment variables. Two of one name are refused by the API server after half of a release is there.
     Argument: {root, path, entries}. */}}
{{- define "enginery.problems.env" -}}
{{- $path := .path -}}
{{- $own := include "enginery.ownVariables" .root | fromJsonArray -}}
{{- $seen := dict -}}
{{- range .entries }}
{{- if has .name $own }}
{{ $path }}: the chart sets {{ .name }}; remove it
{{- end }}
{{- if hasKey $seen .name }}
{{ $path }}: {{ .name }} is there twice; remove one
{{- end }}
{{- if and (hasKey . "value") (hasKey . "valueFrom") }}
{{ $path }}: {{ .name }} has both value and valueFrom; remove one
{{- else if not (or (hasKey . "value") (hasKey . "valueFrom")) }}
{{ $path }}: {{ .name }} has neither value nor valueFrom; give one (`value: ""` is an empty one)
{{- end }}
{{- $_ := set $seen .name true }}
{{- end }}
{{- end -}}

{{/* Of labels for pods: those by which pods are selected stay the chart's. Argument: {path, labels}. */}}
{{- define "enginery.problems.labels" -}}
{{- $path := .path -}}
{{- range $name, $_ := .labels }}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|part-of|version|managed-by)|helm\\.sh/.*|enginery\\.io/.*)$" $name }}
{{ $path }}: the chart sets {{ $name }}, and selects pods by such labels; remove it
{{- else if regexMatch "^(ray\\.io|kueue\\.x-k8s\\.io)/" $name }}
{{ $path }}: the operators set {{ $name }}; remove it
{{- end }}
{{- end }}
{{- end -}}

{{/* Of an image. Argument: {root, which: "control"}. */}}
{{- define "enginery.problems.image" -}}
{{- $image := index .root.Values.images .which -}}
{{- if not $image.repository }}
images.{{ .which }}.repository is empty; build images/{{ .which }}.Dockerfile, push it, and name it here
{{- else if regexMatch ":[^/]*$" $image.repository }}
images.{{ .which }}.repository: {{ $image.repository | quote }} has a tag; put it into images.{{ .which }}.tag, or leave it out where there is a digest
{{- end }}
{{- if and $image.digest $image.tag }}
images.{{ .which }} has both tag {{ $image.tag }} and digest, and a digest alone says which image; remove the tag
{{- end }}
{{- if and (not $image.digest) (not .root.Values.images.allowTags) }}
images.{{ .which }}.digest is empty; give the digest that `docker push` printed (sha256:...), or set images.allowTags=true to go by tag
{{- end }}
{{- if and (not $image.digest) .root.Values.images.allowTags (not $image.tag) }}
images.{{ .which }} has neither digest nor tag; give one
{{- end }}
{{- end -}}

{{/* Of network policies. An empty list allows nothing, and something must be reached. */}}
{{- define "enginery.problems.network" -}}
{{- $net := .Values.networkPolicy -}}
{{- if and $net.enabled (not $net.extraEgress) }}
{{- if and (include "enginery.usesBuckets" .) (not $net.registry.cidrs) (not $net.registry.namespaceSelector) }}
networkPolicy.registry has neither cidrs nor namespaceSelector, so nothing could reach the bucket; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- if and (not .Values.prefect.server.enabled) (not $net.prefect.cidrs) }}
networkPolicy.prefect.cidrs is empty, so nothing could reach prefect.externalApi.url; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- if and .Values.prefect.server.enabled .Values.prefect.server.postgresql.existingSecret (not $net.postgresql.cidrs) }}
networkPolicy.postgresql.cidrs is empty, so the Prefect server could not reach its database; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- end }}
{{- end -}}

{{/* A duration of Prometheus ('30s') in milliseconds. */}}
{{- define "enginery.milliseconds" -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- mul (trimSuffix $unit . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) -}}
{{- end -}}

{{/* Of the metrics. */}}
{{- define "enginery.problems.metrics" -}}
{{- $monitor := .Values.metrics.serviceMonitor -}}
{{- if and $monitor.enabled (not .Values.metrics.enabled) }}
metrics.serviceMonitor.enabled is true and metrics.enabled is false: there is nothing to scrape; set metrics.enabled=true
{{- end }}
{{- if gt (include "enginery.milliseconds" $monitor.scrapeTimeout | int64) (include "enginery.milliseconds" $monitor.interval | int64) }}
metrics.serviceMonitor: scrapeTimeout {{ $monitor.scrapeTimeout }} is longer than interval {{ $monitor.interval }}, which Prometheus refuses; shorten it
{{- end }}
{{- end -}}
