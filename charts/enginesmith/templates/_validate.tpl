{{/* What a schema cannot say: rules between values. Each ends the command with what is wrong and the remedy. */}}
{{- define "enginesmith.validate" -}}
{{- with include "enginesmith.problems.nothing" (list "" (.Files.Get "files/defaults.json" | fromJson) .Values) -}}
{{- fail (printf "\n%s\n" .) -}}
{{- end -}}
{{- $problems := list -}}
{{- $full := include "enginesmith.fullname" . -}}

{{- if gt (len $full) 40 -}}
{{- $problems = append $problems (printf "fullnameOverride: %q has %d characters; names made from it fit up to 40: shorten it" $full (len $full)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $full) -}}
{{- $problems = append $problems (printf "%q does not begin with a letter or has a dot, and services must begin with one and have none; give fullnameOverride" $full) -}}
{{- end -}}

{{- $lines := list (include "enginesmith.problems.image" (dict "root" . "which" "control")) -}}
{{- if .Values.gpuGroups }}{{ $lines = append $lines (include "enginesmith.problems.image" (dict "root" . "which" "worker")) }}{{ end -}}
{{- $lines = append $lines (include "enginesmith.problems.env" (dict "root" . "path" "extraEnv" "entries" .Values.extraEnv)) -}}
{{- $lines = append $lines (include "enginesmith.problems.volumes" (dict "path" "" "all" .Values "own" dict)) -}}
{{- $volumes := list "tmp" (ternary "registry" "tmp" (ne .Values.registry.existingClaim "")) (ternary "ca" "tmp" (ne .Values.registry.caBundle.configMap "")) -}}
{{- range .Values.extraVolumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- $lines = append $lines (include "enginesmith.problems.containers" (dict "path" "extraInitContainers" "containers" .Values.extraInitContainers "volumes" $volumes)) -}}
{{- range $path, $own := dict "prefect.server." .Values.prefect.server "prefect.worker." .Values.prefect.worker "ray.head." .Values.ray.head -}}
{{- $lines = append $lines (include "enginesmith.problems.part" (dict "root" $ "path" $path "own" $own "all" dict)) -}}
{{- end -}}
{{- range $path, $own := dict "metrics." .Values.metrics "site." .Values.site -}}
{{- $lines = append $lines (include "enginesmith.problems.part" (dict "root" $ "path" $path "own" $own "all" $.Values)) -}}
{{- end -}}
{{- $runs := .Values.prefect.flowRuns -}}
{{- $lines = append $lines (include "enginesmith.problems.amounts" (list "prefect.flowRuns" (dict "memoryRequest" $runs.memoryRequest) (dict "memoryRequest" $runs.memoryLimit))) -}}
{{- $lines = append $lines (include "enginesmith.problems.everywhere" (list "" (omit .Values "global"))) -}}
{{- $lines = append $lines (include "enginesmith.problems.exposure" .) -}}
{{- $lines = append $lines (include "enginesmith.problems.network" .) -}}
{{- $lines = append $lines (include "enginesmith.problems.metrics" .) -}}
{{- $lines = append $lines (include "enginesmith.problems.replicas" .) -}}
{{- $lines = append $lines (include "enginesmith.problems.nodeCache" .) -}}
{{- range $path, $schedule := dict "fleet.schedule" .Values.fleet.schedule "ray.finishSchedule" .Values.ray.finishSchedule -}}
{{- if $schedule }}{{ $lines = append $lines (include "enginesmith.problems.schedule" (dict "path" $path "schedule" $schedule)) }}{{ end -}}
{{- end -}}
{{- $lines = append $lines (include "enginesmith.problems.installed" .) -}}
{{- if and .Values.nodeCache.enabled .Values.images.client.repository }}{{ $lines = append $lines (include "enginesmith.problems.image" (dict "root" . "which" "client")) }}{{ end -}}
{{- $cpu := ternary (list (merge (dict "name" "cpu") .Values.cpuGroup)) list .Values.cpuGroup.enabled -}}
{{- range $group := concat $cpu .Values.gpuGroups -}}
{{- $path := ternary "cpuGroup." (printf "gpuGroups.%s." .name) (eq .name "cpu") -}}
{{- if ne .name "cpu" }}{{ $group = include "enginesmith.ray.gpuGroup" (list $ .) | fromJson }}{{ end -}}
{{- $lines = append $lines (include "enginesmith.problems.part" (dict "root" $ "path" $path "own" $group "all" $.Values)) -}}
{{- end -}}
{{- range splitList "\n" (join "\n" $lines) }}{{ if . }}{{ $problems = append $problems . }}{{ end }}{{ end -}}

{{- if and .Values.registry.bucket .Values.registry.existingClaim -}}
{{- $problems = append $problems "registry: both bucket and existingClaim are given; a registry is in one place: remove one" -}}
{{- else if not (or .Values.registry.bucket .Values.registry.existingClaim) -}}
{{- $problems = append $problems "registry: neither bucket nor existingClaim is given; name the bucket, or a ReadWriteMany claim" -}}
{{- end -}}

{{- if ne .Values.registry.scheme "s3" -}}
{{- range $option := list "region" "sse" "kmsKey" -}}
{{- if index $.Values.registry $option }}{{ $problems = append $problems (printf "registry.%s is given and registry.scheme=%s has no such option; remove it" $option $.Values.registry.scheme) }}{{ end -}}
{{- end -}}
{{- if not (kindIs "invalid" .Values.registry.pathStyle) }}{{ $problems = append $problems (printf "registry.pathStyle is given and registry.scheme=%s has no such option; remove it" .Values.registry.scheme) }}{{ end -}}
{{- end -}}
{{- if and (eq .Values.registry.scheme "gs") (or .Values.registry.existingSecret .Values.registry.readSecret) -}}
{{- $problems = append $problems "registry.existingSecret is given and registry.scheme=gs reads no keys from it; annotate serviceAccounts.builds with iam.gke.io/gcp-service-account" -}}
{{- end -}}
{{- if and .Values.registry.bucket (ne (eq .Values.registry.scheme "az") (ne .Values.registry.account "")) -}}
{{- $problems = append $problems (printf "registry.account is %q with registry.scheme=%s; a storage account belongs to az, which needs it" .Values.registry.account .Values.registry.scheme) -}}
{{- end -}}
{{- if and .Values.registry.kmsKey (eq .Values.registry.scheme "s3") (not (hasPrefix "aws:kms" .Values.registry.sse)) -}}
{{- $problems = append $problems "registry.kmsKey is given and registry.sse does not ask for it; set registry.sse=aws:kms, or remove the key" -}}
{{- end -}}

{{- $accounts := dict -}}
{{- range $which, $account := .Values.serviceAccounts -}}
{{- $name := include "enginesmith.serviceAccount" (list $ $which) -}}
{{- if and $account.create (not (hasKey $accounts $name)) }}{{ $_ := set $accounts $name $which }}{{ end -}}
{{- end -}}
{{- range $which, $account := .Values.serviceAccounts -}}
{{- $other := get $accounts (include "enginesmith.serviceAccount" (list $ $which)) | default $which -}}
{{- if ne $other $which -}}
{{- $problems = append $problems (printf "serviceAccounts.%s: %q is made for serviceAccounts.%s, too, and each has rights of its own; give another name" $which (include "enginesmith.serviceAccount" (list $ $which)) $other) -}}
{{- end -}}
{{- if and $account.create (eq $account.name "default") -}}
{{- $problems = append $problems (printf "serviceAccounts.%s: the account \"default\" is there in every namespace and cannot be made; give another name, or set create=false" $which) -}}
{{- end -}}
{{- if and (ne $which "rayHead") (ne $which "reads") (not $account.create) (not $account.name) -}}
{{- $problems = append $problems (printf "serviceAccounts.%s: create is false and name is empty, so its pods would start with an account that nobody makes; name one that exists" $which) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.fleet.catalog.content .Values.fleet.catalog.existingConfigMap -}}
{{- $problems = append $problems "fleet.catalog: both content and existingConfigMap are given; a fleet has one catalog: remove one" -}}
{{- end -}}
{{- if and .Values.fleet.apply (not .Values.fleet.enabled) -}}
{{- $problems = append $problems "fleet.apply is true and fleet.enabled is false, so nothing would be applied; set fleet.enabled=true or fleet.apply=false" -}}
{{- end -}}
{{- if and .Values.fleet.catalog.content (not .Values.fleet.catalog.content.serve) -}}
{{- $problems = append $problems "fleet.catalog.content has no `serve`; list the models: {serve: [{model: digits, on: [l4]}]}" -}}
{{- end -}}

{{- if and .Values.prefect.server.enabled .Values.prefect.externalApi.url -}}
{{- $problems = append $problems "prefect.externalApi.url is given, and prefect.server.enabled too; set prefect.server.enabled=false to use the external API" -}}
{{- else if not (or .Values.prefect.server.enabled .Values.prefect.externalApi.url) -}}
{{- $problems = append $problems "prefect.server.enabled is false and there is no prefect.externalApi.url; give the URL of a Prefect API" -}}
{{- end -}}

{{- if and .Values.prefect.externalApi.caBundle.configMap (not .Values.prefect.externalApi.url) -}}
{{- $problems = append $problems "prefect.externalApi.caBundle is given and prefect.externalApi.url is empty; give the URL, or remove the bundle" -}}
{{- end -}}
{{- if and .Values.gpuGroups (not .Values.ray.enabled) -}}
{{- $problems = append $problems "gpuGroups are workers of the RayCluster, but ray.enabled is false; set ray.enabled=true or remove them" -}}
{{- end -}}
{{- if and .Values.ray.enabled (semverCompare "<2.52.0" .Values.ray.version) -}}
{{- $problems = append $problems (printf "ray.version: %s has no token authentication; use 2.52.0 or later (the images have the version in constraints.txt)" .Values.ray.version) -}}
{{- end -}}
{{- with .Values.ray.gcsFaultTolerance -}}
{{- if and (or .existingSecret .username) (not .redisAddress) -}}
{{- $problems = append $problems "ray.gcsFaultTolerance: a Secret or user is given and redisAddress is empty, so nothing would be kept; give the address of the Redis" -}}
{{- end -}}
{{- end -}}

{{- $gpus := .Files.Get "files/gpus.yaml" | fromYaml -}}
{{- $seen := dict "cpu" true -}}
{{- range .Values.gpuGroups -}}
{{- $group := include "enginesmith.ray.gpuGroup" (list $ .) | fromJson -}}
{{- if hasKey $seen $group.name -}}
{{- $problems = append $problems (printf "gpuGroups: the name %q is taken%s; rename one" $group.name (ternary " by cpuGroup" "" (eq $group.name "cpu"))) -}}
{{- end -}}
{{- $_ := set $seen $group.name true -}}
{{- if eq $group.name $.Values.prefect.workPool -}}
{{- $problems = append $problems (printf "gpuGroups: the name %q is that of prefect.workPool, too, and canary/%s would be two deployments; rename one" $group.name $group.name) -}}
{{- end -}}
{{- if eq $group.name "headgroup" -}}
{{- $problems = append $problems "gpuGroups: the name \"headgroup\" is taken: KubeRay names the head's group so; rename it" -}}
{{- end -}}
{{- if gt (int $group.min) (int $group.max) -}}
{{- $problems = append $problems (printf "gpuGroups.%s: min %d is more than max %d; raise max or lower min" $group.name (int $group.min) (int $group.max)) -}}
{{- end -}}
{{- if $group.product -}}
{{- $products := (index $gpus $group.generation).products -}}
{{- if not (hasKey $products $group.product) -}}
{{- $problems = append $problems (printf "gpuGroups.%s.product: %q is not a product of %s, which has %s" $group.name $group.product $group.generation (keys $products | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- if and $group.product (contains "/mig-" $group.gpuResource) -}}
{{- $problems = append $problems (printf "gpuGroups.%s: product %q is a whole GPU and gpuResource %s a slice of one, whose engines are others; remove product, or set gpuResource nvidia.com/gpu" $group.name $group.product $group.gpuResource) -}}
{{- end -}}
{{- if and $group.resourceClaimTemplate (ne $group.gpuResource "nvidia.com/gpu") -}}
{{- $problems = append $problems (printf "gpuGroups.%s: both gpuResource %s and resourceClaimTemplate %s are given; a claim takes the place of a resource: remove one" $group.name $group.gpuResource $group.resourceClaimTemplate) -}}
{{- end -}}
{{- range $label, $value := (index $gpus $group.generation).labels -}}
{{- $given := get $group.nodeSelector $label | default $value -}}
{{- if ne $given $value -}}
{{- $problems = append $problems (printf "gpuGroups.%s.nodeSelector: %s is %q, and %s is on nodes with %q; remove it, or name the generation of those nodes" $group.name $label $given $group.generation $value) -}}
{{- end -}}
{{- end -}}
{{- if and (not $group.gpuLabels) (not $group.nodeSelector) -}}
{{- $problems = append $problems (printf "gpuGroups.%s: gpuLabels is false and nodeSelector is empty, so it would run on any GPU; say with nodeSelector which nodes have a %s" $group.name $group.generation) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.cpuGroup.enabled (gt (int .Values.cpuGroup.min) (int .Values.cpuGroup.max)) -}}
{{- $problems = append $problems (printf "cpuGroup: min %d is more than max %d; raise max or lower min" (int .Values.cpuGroup.min) (int .Values.cpuGroup.max)) -}}
{{- end -}}
{{- $groups := add (len .Values.gpuGroups) (ternary 1 0 .Values.cpuGroup.enabled) -}}
{{- if and .Values.kueue.queueName (gt (int $groups) 17) -}}
{{- $problems = append $problems (printf "%d worker groups: Kueue admits 17 at most; merge groups, or split the fleet into two releases" (int $groups)) -}}
{{- end -}}
{{- if and .Values.ray.enabled (eq (int $groups) 0) -}}
{{- $problems = append $problems "ray.enabled is true and there is no worker group; enable cpuGroup or name gpuGroups" -}}
{{- end -}}

{{- if and .Values.canary.enabled (not .Values.canary.traffic) -}}
{{- $problems = append $problems "canary.enabled is true and canary.traffic is empty: every canary would end with nothing to replay; name the place of recorded requests, or set canary.enabled=false" -}}
{{- end -}}
{{- if and .Values.canary.enabled .Values.gpuGroups (gt (include "enginesmith.seconds" .Values.canary.duration | int64) 28800) -}}
{{- $problems = append $problems (printf "canary.duration: a canary on a GPU group takes up to three times %s, and ends after a day; give 8h or less" .Values.canary.duration) -}}
{{- end -}}

{{- if $problems -}}
{{- fail (printf "\n\n%s\n" (join "\n" $problems)) -}}
{{- end -}}
{{- end -}}
