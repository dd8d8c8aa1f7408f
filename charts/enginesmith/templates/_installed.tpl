{{/* Of what is installed already: changes that the API server refuses half way, or that delete what runs. `lookup` finds
     nothing with `helm template`. */}}
{{- define "enginesmith.problems.installed" -}}
{{- $root := . -}}
{{- $full := include "enginesmith.fullname" . -}}
{{- $server := .Values.prefect.server -}}
{{- $own := dict "prefect.server.persistence" (list (printf "%s-prefect-server" $full) $server.persistence)
      "ray.sharedCache" (list (include "enginesmith.sharedCache" .) .Values.ray.sharedCache) -}}
{{- range $path, $pair := $own }}
{{- $values := index $pair 1 }}
{{- if and $values.enabled (not $values.existingClaim) }}
{{- with lookup "v1" "PersistentVolumeClaim" $root.Release.Namespace (index $pair 0) }}
{{- $class := lookup "storage.k8s.io/v1" "StorageClass" "" (.spec.storageClassName | default "-") }}
{{- include "enginesmith.problems.claim" (dict "path" $path "values" $values "claim" . "class" $class) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "enginesmith.problems.names" (dict "root" $root "there" (lookup "v1" "ConfigMap" .Release.Namespace "" | default dict)) }}
{{- end -}}

{{/* Of a claim that is there. Argument: {path, values: size and storageClass, claim, class: its StorageClass, or {}}. */}}
{{- define "enginesmith.problems.claim" -}}
{{- $name := .claim.metadata.name }}
{{- $size := .claim.spec.resources.requests.storage }}
{{- $class := .claim.spec.storageClassName | default "" }}
{{- $now := include "enginesmith.quantity" $size | float64 }}
{{- $wanted := include "enginesmith.quantity" .values.size | float64 }}
{{- if lt $wanted $now }}
{{ .path }}.size: the claim {{ $name }} has {{ $size }} and cannot shrink to {{ .values.size }}; write {{ $size }}, or name another claim as {{ .path }}.existingClaim
{{- else if and (gt $wanted $now) (not .class.allowVolumeExpansion) }}
{{ .path }}.size: the claim {{ $name }} has {{ $size }}, and its storage class {{ $class | quote }} lets no claim grow to {{ .values.size }}; write {{ $size }}, or name another claim as {{ .path }}.existingClaim
{{- end }}
{{- if and .values.storageClass (ne .values.storageClass $class) }}
{{ .path }}.storageClass: the claim {{ $name }} has {{ $class | quote }}, which cannot become {{ .values.storageClass | quote }}; write {{ $class | quote }}, or name another claim as {{ .path }}.existingClaim
{{- end }}
{{- end -}}

{{/* Of names: another one makes new objects, and Helm deletes the old, the RayCluster and its builds with them.
     Argument: {root, there: ConfigMaps of the namespace}. */}}
{{- define "enginesmith.problems.names" -}}
{{- $root := .root }}
{{- $name := include "enginesmith.rayCluster" $root }}
{{- range .there.items }}
{{- $labels := .metadata.labels | default dict }}
{{- if eq (get $labels "app.kubernetes.io/instance") $root.Release.Name }}
{{- if and (hasKey (.data | default dict) "raycluster.yaml") $root.Values.ray.enabled (ne .metadata.name $name) }}
nameOverride, fullnameOverride: the RayCluster {{ .metadata.name }} would be deleted with its builds, and {{ $name }} made; write fullnameOverride: {{ trimSuffix "-ray" .metadata.name }}, or first delete it: kubectl delete configmap {{ .metadata.name }} --namespace {{ $root.Release.Namespace }}
{{- else if and (eq .metadata.name (printf "%s-test" (include "enginesmith.fullname" $root))) (ne (get $labels "app.kubernetes.io/name") (include "enginesmith.name" $root)) }}
nameOverride: the pods of this release are selected by app.kubernetes.io/name={{ get $labels "app.kubernetes.io/name" }}, which cannot change; write that name
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
