{{/* Names and labels. A release name is cut so that the longest name made from it stays within 53 characters, which is
     what a RayCluster may have. */}}
{{- define "enginesmith.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "enginesmith.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains (include "enginesmith.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "enginesmith.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects pods: never changes during a release's life. Argument: (list $ component). */}}
{{- define "enginesmith.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "enginesmith.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object. Argument: (list $ component). No version of the chart in pod templates: see enginesmith.podLabels. */}}
{{- define "enginesmith.labels" -}}
{{- $root := index . 0 -}}
{{ include "enginesmith.selector" . }}
app.kubernetes.io/part-of: enginesmith
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of an object. Argument: (list $ component annotations labels), the last two optional; these labels
     are over those of all objects. */}}
{{- define "enginesmith.meta" -}}
{{- $more := slice . 2 -}}
{{- $labels := include "enginesmith.labels" . -}}
labels:
{{- if gt (len $more) 1 }}
  {{- toYaml (merge (dict) (last $more) (fromYaml $labels)) | nindent 2 }}
{{- else }}
  {{- $labels | nindent 2 }}
{{- end }}
{{- include "enginesmith.annotations" (list (first .) (ternary dict (first $more) (empty $more))) }}
{{- end -}}

{{/* Annotations of an object: its own, then those of all. Argument: (list $ annotations). */}}
{{- define "enginesmith.annotations" -}}
{{- with merge (dict) (last .) (first .).Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Labels of pods: those that select them, and the user's. A chart's version in here would restart every pod, and change
     Ray's worker groups, on each upgrade. Those of the accounts `builds` and `reads` have their labels, too. Argument: (list $ component). */}}
{{- define "enginesmith.podLabels" -}}
{{- $values := (index . 0).Values -}}
{{- $reads := has (index . 1) (list "metrics" "site" (ternary "" "node-cache" $values.rollouts.enabled)) -}}
{{- $account := ternary (include "enginesmith.readAccount" (index . 0)) "builds" $reads -}}
{{- $own := or $reads (has (index . 1) (list "flow-run" "ray-worker" "deploy" "test" "node-cache")) -}}
{{ include "enginesmith.selector" . }}
{{- with merge (dict) (ternary (index $values.serviceAccounts $account).podLabels dict $own) $values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Which of serviceAccounts what only reads the registry has: "reads", or "builds" where that alone has an identity. */}}
{{- define "enginesmith.readAccount" -}}
{{- with .Values.serviceAccounts -}}
{{- ternary "reads" "builds" (and (or .reads.create .reads.name) (or .reads.name .reads.annotations (not (or .builds.annotations .builds.podLabels))) | not | not) -}}
{{- end -}}
{{- end -}}

{{/* Name of a service account. Argument: (list $ "prefectWorker"). */}}
{{- define "enginesmith.serviceAccount" -}}
{{- $root := index . 0 -}}
{{- $account := index $root.Values.serviceAccounts (index . 1) -}}
{{- if eq (index . 1) "rayHead" -}}
{{- /* The KubeRay operator's choice. */ -}}
{{- $account.name | default (include "enginesmith.rayCluster" $root) -}}
{{- else -}}
{{- $account.name | default (printf "%s-%s" (include "enginesmith.fullname" $root) (index . 1 | kebabcase)) -}}
{{- end -}}
{{- end -}}

{{/* An image by digest. Argument: (list $ "control"). */}}
{{- define "enginesmith.image" -}}
{{- $image := index (index . 0).Values.images (index . 1) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository $image.tag -}}
{{- end -}}
{{- end -}}

{{/* URI of the registry, as ENGINESMITH_REGISTRY has it. */}}
{{- define "enginesmith.registry" -}}
{{- $registry := .Values.registry -}}
{{- if $registry.existingClaim -}}
file:///registry
{{- else -}}
{{- $options := list -}}
{{- range $option, $value := dict "endpoint" $registry.endpoint "region" $registry.region "sse" $registry.sse "kms_key" $registry.kmsKey -}}
{{- if $value }}{{ $options = append $options (printf "%s=%s" $option $value) }}{{ end -}}
{{- end -}}
{{- if not (kindIs "invalid" $registry.pathStyle) -}}
{{- $options = append $options (printf "path_style=%s" (ternary "1" "0" $registry.pathStyle)) -}}
{{- end -}}
{{ $registry.scheme }}://{{ with $registry.account }}{{ . }}/{{ end }}{{ $registry.bucket }}/{{ $registry.prefix }}{{ if $options }}?{{ join "&" (sortAlpha $options) }}{{ end }}
{{- end -}}
{{- end -}}

{{/* A size of the command line ('100GiB') in bytes. */}}
{{- define "enginesmith.bytes" -}}
{{- $unit := regexFind "[KMGT]iB$" . -}}
{{- mul (trimSuffix $unit . | trimSuffix "B" | int64) (get (dict "" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776) $unit) -}}
{{- end -}}

{{/* The variable that the object store's library reads certificate authorities from. */}}
{{- define "enginesmith.caBundleVariable" -}}
{{- ternary "AWS_CA_BUNDLE" "REQUESTS_CA_BUNDLE" (eq .Values.registry.scheme "s3") -}}
{{- end -}}

{{/* Prefect's API as pods reach it. */}}
{{- define "enginesmith.prefectApi" -}}
{{- if .Values.prefect.server.enabled -}}
http://{{ include "enginesmith.fullname" . }}-prefect-server:4200/api
{{- else -}}
{{- .Values.prefect.externalApi.url -}}
{{- end -}}
{{- end -}}

{{/* What tells this release from others that serve the same pool. */}}
{{- define "enginesmith.clusterUid" -}}
{{- .Values.prefect.worker.clusterUid | default (printf "%s/%s" .Release.Namespace (include "enginesmith.fullname" .) | sha256sum | trunc 32) -}}
{{- end -}}

{{/* Registered models whose build has not begun, as Prometheus counts them. */}}
{{- define "enginesmith.notBuilt" -}}
enginesmith_registered_timestamp_seconds > on (model) enginesmith_last_run_timestamp_seconds or enginesmith_registered_timestamp_seconds unless on (model) enginesmith_last_run_timestamp_seconds
{{- end -}}

{{/* Name of the RayCluster. */}}
{{- define "enginesmith.rayCluster" -}}
{{- printf "%s-ray" (include "enginesmith.fullname" .) -}}
{{- end -}}

{{/* Ray's address for clients outside of the cluster's own pods. */}}
{{- define "enginesmith.rayAddress" -}}
ray://{{ include "enginesmith.rayCluster" . }}-head-svc:10001
{{- end -}}

{{/* Name of the claim that Ray's workers share, or nothing. */}}
{{- define "enginesmith.sharedCache" -}}
{{- if .Values.ray.sharedCache.enabled -}}
{{- .Values.ray.sharedCache.existingClaim | default (printf "%s-ray-cache" (include "enginesmith.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{/* Not empty where pods read or write a bucket: the registry, specs, recorded traffic. */}}
{{- define "enginesmith.usesBuckets" -}}
{{- $traffic := ternary .Values.canary.traffic "" .Values.canary.enabled -}}
{{- $specs := ternary .Values.catalog.place "" .Values.catalog.enabled -}}
{{- if or .Values.registry.bucket (regexMatch "^(s3|gs|az)://" $traffic) (regexMatch "^(s3|gs|az)://" $specs) -}}
true
{{- end -}}
{{- end -}}

{{/* The ports of addresses ('https://minio:9000', 'redis:6380'), as JSON. Argument: a list of texts. */}}
{{- define "enginesmith.ports" -}}
{{- $ports := list -}}
{{- range regexFindAll "(https?|rediss?)://[^/?&, ]+|^[^/]+:[0-9]+$" (join "," .) -1 -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default (ternary "80" "443" (hasPrefix "http://" .)) | float64 | minf 9999999999 | int64) -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* A rule of egress to networks, on its ports and those of addresses that values name ('https://minio:9000', 'redis:6380').
     Without peers nothing: a rule whose peers are empty would be open to everything.
     Argument: (list {cidrs, ports, namespaceSelector: optional} addresses). */}}
{{- define "enginesmith.egress" -}}
{{- $ports := list -}}
{{- range (index . 0).ports }}{{ $ports = append $ports (int64 .) }}{{ end -}}
{{- range include "enginesmith.ports" (index . 1) | fromJsonArray -}}
{{- if not (has (int64 .) $ports) }}{{ $ports = append $ports (int64 .) }}{{ end -}}
{{- end -}}
{{- with index . 0 -}}
{{- if or .cidrs .namespaceSelector -}}
egress:
  - to:
      {{- range .cidrs }}
      - ipBlock: {cidr: {{ . | quote }}}
      {{- end }}
      {{- with .namespaceSelector }}
      - namespaceSelector:
          {{- toYaml . | nindent 10 }}
      {{- end }}
    ports:
      {{- range $ports }}
      - {port: {{ . }}, protocol: TCP}
      {{- end }}
{{- end -}}
{{- end -}}
{{- end -}}
