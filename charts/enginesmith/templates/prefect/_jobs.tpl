{{/* What the command `enginesmith prefect deploy` gets. What differs between clusters goes through the variables of the work pool's
     base job template (pipeline/orchestration/deployments/kubernetes.json), never through a template of the chart's own. */}}

{{/* Job variables of every flow run, as JSON. */}}
{{- define "enginesmith.jobVariables" -}}
{{- $runs := .Values.prefect.flowRuns -}}
{{- $env := dict "PREFECT_HOME" "/tmp/prefect" "ENGINESMITH_REGISTRY" (include "enginesmith.registry" .) -}}
{{- range include "enginesmith.env.base" . | fromYamlArray }}{{ $_ := set $env .name .value }}{{ end -}}
{{- $volumes := list (include "enginesmith.scratch" $runs.scratch | fromYamlArray | first) -}}
{{- $mounts := include "enginesmith.mounts.base" . | fromYamlArray -}}
{{- range list "trust" "registry" "prefect" -}}
{{- range include (printf "enginesmith.volumes.%s" .) $ | fromYamlArray }}{{ $volumes = append $volumes . }}{{ end -}}
{{- if ne . "trust" }}{{ range include (printf "enginesmith.mounts.%s" .) $ | fromYamlArray }}{{ $mounts = append $mounts . }}{{ end }}{{ end -}}
{{- end -}}
{{- with .Values.prefect.externalApi.caBundle -}}
{{- if .configMap }}{{ $_ := set $env "PREFECT_API_SSL_CERT_FILE" (printf "/etc/enginesmith/prefect-ca/%s" .key) }}{{ end -}}
{{- end -}}
{{- if .Values.registry.caBundle.configMap -}}
{{- $_ := set $env (include "enginesmith.caBundleVariable" .) (printf "/etc/enginesmith/ca/%s" .Values.registry.caBundle.key) -}}
{{- end -}}
{{- if .Values.ray.enabled -}}
{{- $_ := set $env "RAY_AUTH_MODE" "token" -}}
{{- $_ := set $env "RAY_AUTH_TOKEN_PATH" "/etc/enginesmith/ray/auth_token" -}}
{{- $volumes = append $volumes (dict "name" "ray-token" "secret" (dict "secretName" (include "enginesmith.rayCluster" .))) -}}
{{- $mounts = append $mounts (dict "name" "ray-token" "mountPath" "/etc/enginesmith/ray" "readOnly" true) -}}
{{- end -}}
{{- with .Values.prefect.logLevel }}{{ $_ := set $env "PREFECT_LOGGING_LEVEL" . }}{{ end -}}
{{- range .Values.extraEnv }}{{ $_ := set $env .name (omit . "name") }}{{ end -}}
{{- range include "enginesmith.volumes.extra" (list . dict) | fromYamlArray }}{{ $volumes = append $volumes . }}{{ end -}}
{{- range include "enginesmith.mounts.extra" (list . dict) | fromYamlArray }}{{ $mounts = append $mounts . }}{{ end -}}
{{- $variables := dict
      "namespace" .Release.Namespace
      "image" (include "enginesmith.image" (list . "control"))
      "image_pull_policy" .Values.images.control.pullPolicy
      "service_account_name" (include "enginesmith.serviceAccount" (list . "builds"))
      "labels" (include "enginesmith.podLabels" (list . "flow-run") | fromYaml)
      "env" $env
      "volumes" $volumes
      "volume_mounts" $mounts
      "cpu_request" ($runs.cpuRequest | toString)
      "memory_request" $runs.memoryRequest
      "memory_limit" $runs.memoryLimit
      "finished_job_ttl" $runs.finishedJobTtlSeconds
      "pod_watch_timeout_seconds" $runs.podStartTimeoutSeconds
      "read_only_root_filesystem" true -}}
{{- range $variable, $field := dict "run_as_user" "runAsUser" "run_as_group" "runAsGroup" "fs_group" "fsGroup" -}}
{{- $number := get $.Values.podSecurity $field -}}
{{- if $number }}{{ $_ := set $variables $variable $number }}{{ end -}}
{{- end -}}
{{- $from := .Values.extraEnvFrom -}}
{{- with .Values.registry.existingSecret }}{{ $from = append $from (dict "secretRef" (dict "name" .)) }}{{ end -}}
{{- with $from }}{{ $_ := set $variables "env_from" . }}{{ end -}}
{{- with include "enginesmith.containers" .Values.extraInitContainers | fromJsonArray }}{{ $_ := set $variables "init_containers" . }}{{ end -}}
{{- $pulls := list -}}
{{- range .Values.imagePullSecrets }}{{ $pulls = append $pulls (dict "name" .) }}{{ end -}}
{{- if $pulls }}{{ $_ := set $variables "image_pull_secrets" $pulls }}{{ end -}}
{{- with $runs.nodeSelector }}{{ $_ := set $variables "node_selector" . }}{{ end -}}
{{- with $runs.tolerations }}{{ $_ := set $variables "tolerations" . }}{{ end -}}
{{- with $runs.affinity }}{{ $_ := set $variables "affinity" . }}{{ end -}}
{{- with $runs.priorityClassName }}{{ $_ := set $variables "priority_class_name" . }}{{ end -}}
{{- toJson $variables -}}
{{- end -}}

{{/* A command line, as JSON. Argument: {root, name, only: flows, variables, more: words}. */}}
{{- define "enginesmith.deployCommand" -}}
{{- $root := .root -}}
{{- $command := list "enginesmith" "prefect" "deploy" "--type" "kubernetes" "--pool" $root.Values.prefect.workPool "--name" .name
      "--owner" (include "enginesmith.clusterUid" $root) "--registry" (include "enginesmith.registry" $root) -}}
{{- range .only }}{{ $command = append $command (printf "--only=%s" .) }}{{ end -}}
{{- with $root.Values.canary }}
{{- $command = concat $command (list "--channel" .channel) -}}
{{- if .traffic }}{{ $command = concat $command (list "--traffic" .traffic) }}{{ end -}}
{{- if .duration }}{{ $command = concat $command (list "--canary-duration" .duration) }}{{ end -}}
{{- end -}}
{{- $command = concat $command (list "--catalog" $root.Values.catalog.place) -}}
{{- if $root.Values.garbage.delete }}{{ $command = append $command "--gc-delete" }}{{ end -}}
{{- if $root.Values.ray.enabled -}}
{{- $command = concat $command (list "--executor" "ray" "--ray-address" (include "enginesmith.rayAddress" $root)
      "--wait-for-nodes" $root.Values.ray.waitForNodes) -}}
{{- $slots := dict -}}
{{- range $root.Values.gpuGroups -}}
{{- $group := include "enginesmith.ray.gpuGroup" (list $root .) | fromJson -}}
{{- $_ := set $slots $group.generation (int (add (get $slots $group.generation | default 0) (mul $group.max $group.gpusPerWorker))) -}}
{{- end -}}
{{- range $generation, $count := $slots }}{{ if $count }}{{ $command = concat $command (list "--slots" (printf "%s=%d" $generation (int $count))) }}{{ end }}{{ end -}}
{{- end -}}
{{- $command = concat $command (.more | default list) -}}
{{- $env := list -}}
{{- range $name, $value := .variables.env -}}
{{- $env = append $env (merge (dict "name" $name) (ternary (dict "value" $value) $value (kindIs "string" $value))) -}}
{{- end -}}
{{- range $name, $value := merge (dict "env" $env) .variables }}{{ $command = concat $command (list "--job-variable" (printf "%s=%s" $name (toJson $value))) }}{{ end -}}
{{- toJson $command -}}
{{- end -}}

{{/* Job variables of flow runs that compute nothing themselves, as JSON. Argument: {root, variables: of every flow run, resources}. */}}
{{- define "enginesmith.lightVariables" -}}
{{- $here := deepCopy .variables -}}
{{- $volumes := list (dict "name" "tmp" "emptyDir" (dict "sizeLimit" "1Gi")) -}}
{{- range $here.volumes }}{{ if ne .name "tmp" }}{{ $volumes = append $volumes . }}{{ end }}{{ end -}}
{{- $_ := set $here "volumes" $volumes -}}
{{- range $which, $variable := dict "requests" "request" "limits" "limit" -}}
{{- range $resource := list "cpu" "memory" -}}
{{- $name := printf "%s_%s" $resource $variable -}}
{{- $_ := unset $here $name -}}
{{- with index $.resources $which }}{{ with index . $resource }}{{ $_ := set $here $name (toString .) }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $here -}}
{{- end -}}

{{/* All command lines: the flows of the cluster, and for each GPU group those that need its hardware: proofs, canaries. Their
     flow runs have no GPU: they hand the work to the group's Ray workers. */}}
{{- define "enginesmith.deployCommands" -}}
{{- $root := . -}}
{{- $variables := include "enginesmith.jobVariables" . | fromJson -}}
{{- $flows := list "compile-model" "collect-garbage" "validate-pending" -}}
{{- if .Values.catalog.enabled }}{{ $flows = append $flows "compile-catalog" }}{{ end -}}
{{- if .Values.canary.enabled }}{{ $flows = concat $flows (list "canary" "settle-canary") }}{{ end -}}
{{- if and .Values.canary.enabled .Values.canary.chooseBuckets }}{{ $flows = append $flows "choose-buckets" }}{{ end -}}
{{- if .Values.rollouts.enabled }}{{ $flows = append $flows "advance-rollouts" }}{{ end -}}
{{- $commands := list (include "enginesmith.deployCommand" (dict "root" . "name" .Values.prefect.workPool "only" $flows "variables" $variables) | fromJsonArray) -}}
{{- /* Groups of one GPU (on demand and spot) share one flow: each would run the same canary, and prove the same engines. */ -}}
{{- $asked := list -}}
{{- range .Values.gpuGroups -}}
{{- $group := include "enginesmith.ray.gpuGroup" (list $root .) | fromJson -}}
{{- $flows := list -}}
{{- $wanted := dict "validate-pending" $group.prove "canary" (and $root.Values.canary.enabled $group.canary) -}}
{{- range $flow := list "validate-pending" "canary" -}}
{{- $what := printf "%s/%s" $flow ($group.product | default $group.generation) -}}
{{- if and (get $wanted $flow) (eq $group.gpuResource "nvidia.com/gpu") (not (has $what $asked)) -}}
{{- $flows = append $flows $flow -}}
{{- $asked = append $asked $what -}}
{{- end -}}
{{- end -}}
{{- if $flows -}}
{{- $here := include "enginesmith.lightVariables" (dict "root" $root "variables" $variables "resources" $root.Values.prefect.gpuRuns.resources) | fromJson -}}
{{- $more := list "--on" ($group.product | default $group.generation) -}}
{{- $commands = append $commands (include "enginesmith.deployCommand" (dict "root" $root "name" $group.name "only" $flows "variables" $here "more" $more) | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- if .Values.fleet.enabled -}}
{{- $more := list "--fleet" (ternary "apply" "report" .Values.fleet.apply) "--fleet-schedule" .Values.fleet.schedule -}}
{{- if include "enginesmith.fleetCatalog" . }}{{ $more = concat $more (list "--fleet-catalog" (printf "/etc/enginesmith/fleet/%s" .Values.fleet.catalog.key)) }}{{ end -}}
{{- $here := include "enginesmith.fleetVariables" (list . $variables) | fromJson -}}
{{- $commands = append $commands (include "enginesmith.deployCommand" (dict "root" . "name" .Values.prefect.workPool "only" (list "reconcile-fleet") "variables" $here "more" $more) | fromJsonArray) -}}
{{- end -}}
{{- /* What an earlier revision registered and this one does not, a group's that went, is deleted. */ -}}
{{- $keep := list -}}
{{- range $commands -}}
{{- $name := index . 8 -}}
{{- range . }}{{ if hasPrefix "--only=" . }}{{ $keep = append $keep (printf "--keep=%s/%s" (trimPrefix "--only=" .) $name) }}{{ end }}{{ end -}}
{{- end -}}
{{- toPrettyJson (prepend (rest $commands) (concat (first $commands) $keep)) -}}
{{- end -}}
