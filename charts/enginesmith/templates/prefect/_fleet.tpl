{{/* Fleet reconciliation: a flow that reads the cluster's nodes. It builds nothing, so it gets neither Ray nor its token. */}}

{{/* Name of the ConfigMap with the catalog, or nothing. */}}
{{- define "enginesmith.fleetCatalog" -}}
{{- if .Values.fleet.catalog.existingConfigMap -}}
{{- .Values.fleet.catalog.existingConfigMap -}}
{{- else if .Values.fleet.catalog.content -}}
{{- printf "%s-fleet" (include "enginesmith.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Its job variables, as JSON. Argument: (list $ variables-of-every-flow-run). */}}
{{- define "enginesmith.fleetVariables" -}}
{{- $root := index . 0 -}}
{{- $here := include "enginesmith.lightVariables" (dict "root" $root "variables" (index . 1) "resources" $root.Values.fleet.resources) | fromJson -}}
{{- $_ := set $here "automount_service_account_token" true -}}
{{- $_ := set $here.labels "enginesmith.io/reads" "nodes" -}}
{{- $_ := set $here "env" (omit $here.env "RAY_AUTH_MODE" "RAY_AUTH_TOKEN_PATH") -}}
{{- $volumes := list -}}
{{- range $here.volumes }}{{ if ne .name "ray-token" }}{{ $volumes = append $volumes . }}{{ end }}{{ end -}}
{{- $mounts := list -}}
{{- range $here.volume_mounts }}{{ if ne .name "ray-token" }}{{ $mounts = append $mounts . }}{{ end }}{{ end -}}
{{- with include "enginesmith.fleetCatalog" $root -}}
{{- $volumes = append $volumes (dict "name" "catalog" "configMap" (dict "name" .)) -}}
{{- $mounts = append $mounts (dict "name" "catalog" "mountPath" "/etc/enginesmith/fleet" "readOnly" true) -}}
{{- end -}}
{{- $_ := set $here "volumes" $volumes -}}
{{- $_ := set $here "volume_mounts" $mounts -}}
{{- toJson $here -}}
{{- end -}}
