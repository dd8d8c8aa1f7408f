{{/* Rules between values that "enginesmith.validate" collects. Each prints a line per mistake: what, which value, the remedy. */}}

{{/* Names of environment variables that the chart sets somewhere, as JSON. */}}
{{- define "enginesmith.ownVariables" -}}
{{- $texts := list (include "enginesmith.env.base" .) (include "enginesmith.env.registry" .) (include "enginesmith.env.prefect" .)
      (include "enginesmith.env.prefectWorker" .) (include "enginesmith.env.database" .) (include "enginesmith.env.prefectShared" .) -}}
{{- $names := list "ENGINESMITH_CACHE" "ENGINESMITH_CACHE_BYTES" "ENGINESMITH_NODE" "PREFECT_UI_STATIC_DIRECTORY" "PREFECT_UI_API_URL"
      "PREFECT_SERVER_LOGGING_LEVEL" "PREFECT_SERVER_API_AUTH_STRING" -}}
{{- if .Values.ray.enabled }}{{ $texts = append $texts (include "enginesmith.env.ray" .) }}{{ $names = append $names "RAY_AUTH_TOKEN_PATH" }}{{ end -}}
{{- range $texts }}{{ range fromYamlArray . }}{{ $names = append $names .name }}{{ end }}{{ end -}}
{{- toJson $names -}}
{{- end -}}

{{/* Of a list of environment variables. Two of one name are refused by the API server after half of a release is there.
     Argument: {root, path, entries}. */}}
{{- define "enginesmith.problems.env" -}}
{{- $path := .path -}}
{{- $own := include "enginesmith.ownVariables" .root | fromJsonArray -}}
{{- $seen := dict -}}
{{- range .entries }}
{{- if has .name $own }}
{{ $path }}: the chart sets {{ .name }}; remove it
{{- else if and (has .name (list "http_proxy" "https_proxy" "no_proxy")) (has (upper .name) $own) }}
{{ $path }}: {{ .name }} and {{ upper .name }}, which `proxy` sets, are one setting to programs; remove it
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

{{/* Rules for parts that many values have: labels of pods, annotations, amounts, containers, affinities. Argument: (list path value). */}}
{{- define "enginesmith.problems.everywhere" -}}
{{- $path := first . -}}
{{- $value := last . -}}
{{- if kindIs "slice" $value }}
{{- range $place, $item := $value }}
{{- $name := toString $place }}
{{- if kindIs "map" $item }}{{ $name = get $item "name" | default $name }}{{ end }}
{{- include "enginesmith.problems.everywhere" (list (printf "%s.%s" $path $name) $item) }}
{{- end }}
{{- else if kindIs "map" $value }}
{{- if regexMatch "(^|[.])(common|pod)Labels$" $path }}
{{- include "enginesmith.problems.labels" (dict "path" $path "labels" $value) }}
{{- else if regexMatch "[aA]nnotations$" $path }}
{{- include "enginesmith.problems.annotations" (dict "path" $path "annotations" $value) }}
{{- else }}
{{- include "enginesmith.problems.amounts" (list (printf "%s.requests" $path) $value.requests $value.limits) }}
{{- $own := dict "app.kubernetes.io/name" "" "app.kubernetes.io/instance" "" "app.kubernetes.io/component" "" "enginesmith.io/group" "" }}
{{- $selector := $value.labelSelector | default $own | toJson }}
{{- range $key := $value.matchLabelKeys }}
{{- if or (contains (printf "%q:" $key) $selector) (contains (printf "\"key\":%q" $key) $selector) }}
{{ $path }}: {{ $key }} is in matchLabelKeys and, given or by default, in labelSelector; remove it from one
{{- end }}
{{- if has $key ($value.mismatchLabelKeys | default list) }}
{{ $path }}: {{ $key }} is in matchLabelKeys and mismatchLabelKeys; remove one
{{- end }}
{{- end }}
{{- $names := list (get (dict "metrics" "exporter" "site" "site" "prefect.server" "server" "prefect.worker" "worker" "ray.head" "ray-head" "nodeCache" "watch") $path | default "ray-worker") }}
{{- range $value.extraContainers }}{{ $names = append $names .name }}{{ end }}
{{- range $name, $_ := $value.podAnnotations }}
{{- if and (hasPrefix "container.apparmor.security.beta.kubernetes.io/" $name) (not (has (splitList "/" $name | last) $names)) }}
{{ $path }}.podAnnotations: {{ $name }} is for a container that the pods do not have, which is refused; end it with /{{ join " or /" $names }}
{{- end }}
{{- end }}
{{- range $key, $inner := $value }}
{{- include "enginesmith.problems.everywhere" (list (printf "%s.%s" $path $key | trimPrefix ".") $inner) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of labels for pods: those by which pods are selected stay the chart's. Argument: {path, labels}. */}}
{{- define "enginesmith.problems.labels" -}}
{{- $path := .path -}}
{{- range $name, $_ := .labels }}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|part-of|version|managed-by)|helm\\.sh/.*|enginesmith\\.io/.*)$" $name }}
{{ $path }}: the chart sets {{ $name }}, and selects pods by such labels; remove it
{{- else if regexMatch "^((ray|batch\\.kubernetes|kueue\\.x-k8s)\\.io/|(job-name|controller-uid)$)" $name }}
{{ $path }}: Kubernetes or an operator sets {{ $name }}; remove it
{{- end }}
{{- end }}
{{- end -}}

{{/* Of annotations: Helm reads some, and pipeline/orchestration/kuberay the chart's own. Argument: {path, annotations}. */}}
{{- define "enginesmith.problems.annotations" -}}
{{- $path := .path -}}
{{- range $name, $value := .annotations }}
{{- if and (eq $name "helm.sh/resource-policy") (not (regexMatch "(common|pod)Annotations$" $path)) }}{{/* Helm keeps that object. */}}
{{- else if regexMatch "^((meta[.])?helm[.]sh|enginesmith[.]io)/" $name }}
{{ $path }}: the chart sets {{ $name }}; remove it
{{- else if or (regexMatch "^(ray[.]io/ft-enabled|kubernetes[.]io/config[.]mirror|service[.]beta[.]kubernetes[.]io/load-balancer-source-ranges|scheduler[.]alpha[.]kubernetes[.]io/tolerations|deprecated[.]daemonset[.]template[.]generation)$" $name)
      (and (hasPrefix "container.apparmor.security.beta.kubernetes.io/" $name) (not (regexMatch "^(runtime/default|unconfined|localhost/.*)?$" $value)))
      (hasPrefix "container.seccomp.security.alpha" $name)
      (and (hasPrefix "seccomp.security.alpha" $name) (not (has $value (list "runtime/default" "docker/default")))) }}
{{ $path }}: an object with {{ $name }} beside what the chart sets is refused; remove it
{{- else if and (eq $name "controller.kubernetes.io/pod-deletion-cost") (ne (toString (max -2147483648 (min 2147483647 (int64 $value)))) $value) }}
{{ $path }}: {{ $name }} is {{ $value | quote }} and no whole number of 32 bits; give one as "100"
{{- end }}
{{- end }}
{{- if gt (len (toJson .annotations)) 131072 }}
{{ $path }}: {{ len (toJson .annotations) }} bytes, and Kubernetes keeps 262144 of an object's annotations; shorten them to half of that
{{- end }}
{{- end -}}

{{/* Of volumes and mounts: names and places that the chart has, mounts of nothing. Argument: {path: "gpuGroups.l4.", all: the
     values, own: the group's}. */}}
{{- define "enginesmith.problems.volumes" -}}
{{- $path := .path -}}
{{- $volumes := .own.extraVolumes | default (ternary list .all.extraVolumes (ne .path "")) -}}
{{- $mounts := .own.extraVolumeMounts | default (ternary list .all.extraVolumeMounts (ne .path "")) -}}
{{- $names := list -}}
{{- range $volumes }}
{{- if has .name (list "tmp" "cache" "registry" "ca" "ray-token" "prefect-ca" "catalog" "commands" "selftest" "node" "site" "trust" "data") }}
{{ $path }}extraVolumes: the chart has a volume {{ .name }}; give another name
{{- end }}
{{- if has .name $names }}
{{ $path }}extraVolumes: {{ .name }} is there twice; remove one
{{- end }}
{{- $names = append $names .name }}
{{- $files := list }}
{{- range (.projected | default dict).sources }}
{{- range $source := . }}
{{- range concat ($source.items | default list) (ternary (list $source) list (hasKey $source "path")) }}
{{- if has .path $files }}
{{ $path }}extraVolumes: two sources have a file {{ .path }}; give another path
{{- end }}
{{- $files = append $files .path }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range .all.extraVolumes }}{{ $names = append $names .name }}{{ end }}
{{- $places := list -}}
{{- range $mounts }}
{{- if not (has .name $names) }}
{{ $path }}extraVolumeMounts: {{ .mountPath }} is of volume {{ .name | quote }}, which extraVolumes does not have; name one of them
{{- end }}
{{- if regexMatch (printf "^/(tmp|cache|registry|node|site|%setc/enginesmith(/.*)?)/?$" (ternary "data|" "" (eq $path "prefect.server."))) .mountPath }}
{{ $path }}extraVolumeMounts: the chart mounts something at {{ .mountPath }}; give another place
{{- end }}
{{- if has .mountPath $places }}
{{ $path }}extraVolumeMounts: {{ .mountPath }} is there twice; remove one
{{- end }}
{{- $places = append $places .mountPath }}
{{- end }}
{{- end -}}

{{/* Of containers: names that are taken, mounts of nothing; the API server would refuse the pods one by one, later.
     Argument: {path, containers, volumes: names, others: containers of the same pods, optional}. */}}
{{- define "enginesmith.problems.containers" -}}
{{- $path := .path -}}
{{- $volumes := .volumes -}}
{{- $names := list -}}
{{- range .others }}{{ $names = append $names .name }}{{ end }}
{{- $own := list "ray-worker" "ray-head" "autoscaler" "wait-gcs-ready" "prefect-job" "server" "worker" "wait-for-prefect" "exporter" "site" -}}
{{- range $container := .containers }}
{{- if has .name $own }}
{{ $path }}: there is a container {{ .name }} already; give another name
{{- end }}
{{- if has .name $names }}
{{ $path }}: {{ .name }} is there twice; remove one
{{- end }}
{{- $names = append $names .name }}
{{- range $pair := list (list "env" "name") (list "volumeMounts" "mountPath") (list "ports" "name") (list "ports" "containerPort") }}
{{- $seen := list }}
{{- range index $container (first $pair) }}
{{- $entry := get . (last $pair) }}
{{- if eq (last $pair) "containerPort" }}{{ $entry = printf "%v/%s" $entry (.protocol | default "TCP") }}{{ end }}
{{- if and $entry (has $entry $seen) }}
{{ $path }}.{{ $container.name }}.{{ first $pair }}: {{ $entry }} is there twice; remove one
{{- end }}
{{- $seen = append $seen $entry }}
{{- end }}
{{- end }}
{{- range .env }}
{{- if and (hasKey . "value") (hasKey . "valueFrom") }}
{{ $path }}.{{ $container.name }}.env: {{ .name }} has both value and valueFrom; remove one
{{- end }}
{{- end }}
{{- range .volumeMounts }}
{{- if not (has .name $volumes) }}
{{ $path }}.{{ $container.name }}: {{ .mountPath }} is of volume {{ .name | quote }}, which extraVolumes does not have; name one of them
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of what is added to one component. Argument: {root, path: "ray.head.", own: its values, all: those of every such pod, or {}}. */}}
{{- define "enginesmith.problems.part" -}}
{{- $path := .path -}}
{{- include "enginesmith.problems.env" (dict "root" .root "path" (printf "%sextraEnv" $path) "entries" .own.extraEnv) }}
{{- include "enginesmith.problems.volumes" . }}
{{- $volumes := list "tmp" }}
{{- range concat (.own.extraVolumes | default list) (.all.extraVolumes | default list) }}{{ $volumes = append $volumes .name }}{{ end }}
{{- $others := ternary (.root.Values.extraInitContainers) list (regexMatch "^(cpuGroup|gpuGroups)[.]" $path) }}
{{- include "enginesmith.problems.containers" (dict "path" (printf "%sextraContainers" $path) "containers" .own.extraContainers "volumes" $volumes "others" $others) }}
{{- $seen := list }}
{{- range .own.topologySpreadConstraints }}
{{- $kind := printf "%s, %s" .topologyKey .whenUnsatisfiable }}
{{- if has $kind $seen }}
{{ $path }}topologySpreadConstraints: {{ $kind }} is there twice; remove one
{{- end }}
{{- $seen = append $seen $kind }}
{{- end }}
{{- end -}}

{{/* Of the ways from outside to the Prefect server: who reaches its API runs code here. */}}
{{- define "enginesmith.problems.exposure" -}}
{{- $server := .Values.prefect.server -}}
{{- range $way, $open := dict "ingress" $server.ingress.enabled "httpRoute" $server.httpRoute.enabled -}}
{{- if $open }}
{{- if not $server.enabled }}
prefect.server.{{ $way }}.enabled is true and prefect.server.enabled is false: there is nothing to reach; set prefect.server.{{ $way }}.enabled=false
{{- end }}
{{- if not $server.auth.existingSecret }}
prefect.server.{{ $way }}: whoever reaches the API runs code in this namespace; give prefect.server.auth.existingSecret
{{- end }}
{{- if regexMatch "//(localhost|127[.])" $server.uiApiUrl }}
prefect.server.uiApiUrl: {{ $server.uiApiUrl }} is the browser's own machine; give the URL of the host that is routed here (https://prefect.example/api)
{{- else if not (regexMatch "^https?://([a-z0-9]([a-z0-9-]*[a-z0-9])?[.])*[a-z]([a-z0-9-]*[a-z0-9])?(:[0-9]+)?/api$" $server.uiApiUrl) }}
prefect.server.uiApiUrl: {{ $server.uiApiUrl }} is not https://HOST/api, and a whole host is routed to the server, by its name; give such a URL
{{- end }}
{{- if and $.Values.networkPolicy.enabled (not $.Values.networkPolicy.prefect.from) }}
networkPolicy.prefect.from is empty, so what routes to the Prefect server could not reach it; name its namespace or pods
{{- end }}
{{- end }}
{{- end }}
{{- range $way := list "ingress" "httpRoute" }}
{{- if (index $.Values.site $way).enabled }}
{{- if not $.Values.site.enabled }}
site.{{ $way }}.enabled is true and site.enabled is false: there is nothing to reach; set site.enabled=true
{{- end }}
{{- if not $.Values.site.host }}
site.{{ $way }}: site.host is empty; give the host of the site, or set site.exposed=true for a path at the Prefect server's
{{- end }}
{{- if and $.Values.networkPolicy.enabled (not $.Values.networkPolicy.site.from) }}
networkPolicy.site.from is empty, so what routes to the site could not reach it; name its namespace or pods
{{- end }}
{{- end }}
{{- end }}
{{- range $path, $own := dict "prefect.server" $server "site" .Values.site }}
{{- $class := get (merge (dict) $own.ingress.annotations $.Values.commonAnnotations) "kubernetes.io/ingress.class" | default $own.ingress.className }}
{{- if and $own.ingress.enabled $own.ingress.className (ne $class $own.ingress.className) }}
{{ $path }}.ingress: className is {{ $own.ingress.className }} and the annotation kubernetes.io/ingress.class {{ $class }}; remove the annotation
{{- end }}
{{- if and $own.httpRoute.enabled (not $own.httpRoute.parentRefs) }}
{{ $path }}.httpRoute.parentRefs is empty, and a route without a gateway routes nothing; name one
{{- end }}
{{- $seen := list }}
{{- range $own.httpRoute.parentRefs }}
{{- $gateway := dict "name" .name "namespace" (.namespace | default $.Release.Namespace) "kind" (.kind | default "Gateway")
      "group" (ternary .group "gateway.networking.k8s.io" (hasKey . "group")) }}
{{- if and (has $gateway $seen) (or (not .sectionName) (has (list $gateway "") $seen) (has (list $gateway .sectionName) $seen)) }}
{{ $path }}.httpRoute.parentRefs: {{ .name }} is there twice; give each a sectionName of its own, the name of a listener
{{- end }}
{{- $seen = append $seen $gateway | concat (list (list $gateway (.sectionName | default ""))) }}
{{- end }}
{{- end }}
{{- if and (or (and .Values.site.ingress.enabled $server.ingress.enabled) (and .Values.site.httpRoute.enabled $server.httpRoute.enabled)) (eq .Values.site.host (urlParse $server.uiApiUrl).hostname) }}
site.host: {{ .Values.site.host }} is the host of prefect.server.uiApiUrl, too, and a whole host is routed to each; give another host, or set site.exposed=true for a path of this one
{{- end }}
{{- if and .Values.site.exposed (not .Values.site.enabled) }}
site.exposed is true and site.enabled is false: there is nothing to reach; set site.enabled=true
{{- else if and .Values.site.exposed (regexMatch "^/(api|assets|automations|blocks|concurrency-limits|dashboard|deployments|docs|events|flow-runs?|flows?|health|login|ready|runs|settings|task-runs?|ui|variables|work-pools?|work-queues?)(/|$)" .Values.site.path) }}
site.path: {{ .Values.site.path }} is a path of the Prefect server, at the same host; give another one, such as /registry
{{- else if and .Values.site.exposed (not (or $server.ingress.enabled $server.httpRoute.enabled)) }}
site.exposed is true, and the Prefect server has neither an Ingress nor an HTTPRoute that its path could be added to; set prefect.server.ingress.enabled=true, or site.exposed=false
{{- end }}
{{- end -}}

{{/* Of an image. Argument: {root, which: "control"}. */}}
{{- define "enginesmith.problems.image" -}}
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

{{/* The text of a ConfigMap that grows with the groups; more than Kubernetes keeps in one ends the command.
     Argument: (list $ name text). */}}
{{- define "enginesmith.fitting" -}}
{{- $values := (index . 0).Values -}}
{{- if gt (len (index . 2)) 1048000 -}}
{{- fail (printf "\n\nConfigMap %s takes %d bytes with %d groups, and Kubernetes keeps 1048576 in one; name fewer groups (one serves all nodes of a kind: raise its max), shorten what they have of extraEnv and the like, or split the fleet into two releases\n" (index . 1) (len (index . 2)) (add (len $values.gpuGroups) (ternary 1 0 $values.cpuGroup.enabled))) -}}
{{- end -}}
{{- index . 2 -}}
{{- end -}}

{{/* A quantity ('500m', '16Gi', 8) as a number. */}}
{{- define "enginesmith.quantity" -}}
{{- $unit := regexFind "[A-Za-z]+$" (toString .) -}}
{{- $sizes := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- mulf (toString . | trimSuffix $unit | float64) (get $sizes $unit) -}}
{{- end -}}

{{/* Of requests and limits: who raises a request alone has the default limit below it. Argument: (list path requests limits). */}}
{{- define "enginesmith.problems.amounts" -}}
{{- $path := first . -}}
{{- $limits := last . | default dict -}}
{{- range $name, $request := index . 1 }}
{{- $limit := get $limits $name }}
{{- if and $limit (gt (include "enginesmith.quantity" $request | float64) (include "enginesmith.quantity" $limit | float64)) }}
{{ $path }}.{{ $name }}: {{ $request }} is more than the limit, {{ $limit }}; raise the limit, too
{{- end }}
{{- end }}
{{- end -}}

{{/* A duration of Prometheus ('30s') in milliseconds. */}}
{{- define "enginesmith.milliseconds" -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- mul (trimSuffix $unit . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) -}}
{{- end -}}

{{/* A duration of the command line ('30m') in seconds; 0 for none. */}}
{{- define "enginesmith.seconds" -}}
{{- $unit := regexFind "[a-z]$" . -}}
{{- mul (trimSuffix $unit . | default "0" | int64) (get (dict "" 0 "s" 1 "m" 60 "h" 3600 "d" 86400) $unit) -}}
{{- end -}}

{{/* Of the numbers of Prefect's servers and workers. */}}
{{- define "enginesmith.problems.replicas" -}}
{{- $server := .Values.prefect.server -}}
{{- if and $server.enabled (gt (int $server.replicas) 1) }}
{{- range $field, $what := dict "postgresql" "a PostgreSQL database" "redis" "a Redis" }}
{{- if not (index $server $field).existingSecret }}
prefect.server.replicas is {{ int $server.replicas }}, and several servers share {{ $what }}; give prefect.server.{{ $field }}.existingSecret, or set replicas=1
{{- end }}
{{- end }}
{{- if not $server.postgresql.migrateHook }}
prefect.server.replicas is {{ int $server.replicas }}, and no server updates the schema at its start; set prefect.server.postgresql.migrateHook=true, or replicas=1
{{- end }}
{{- end }}
{{- $worker := .Values.prefect.worker }}
{{- $scale := $worker.autoscaling }}
{{- if and $scale.enabled (not $worker.enabled) }}
prefect.worker.autoscaling.enabled is true and prefect.worker.enabled is false: there is nothing to scale; set prefect.worker.enabled=true
{{- end }}
{{- if and $scale.enabled (lt (int $scale.max) (int $worker.replicas)) }}
prefect.worker.autoscaling: max {{ int $scale.max }} is less than replicas {{ int $worker.replicas }}, the minimum; raise max or lower replicas
{{- end }}
{{- if and $scale.enabled $scale.keda.prometheus (not .Values.metrics.enabled) }}
prefect.worker.autoscaling.keda.prometheus is given and metrics.enabled is false: no metric would say what waits; set metrics.enabled=true
{{- end }}
{{- if and $scale.enabled (not $scale.keda.prometheus) (not ($worker.resources.requests | default dict).cpu) }}
prefect.worker.autoscaling: the use of CPUs is a part of the request, and prefect.worker.resources.requests.cpu is not given; give it
{{- end }}
{{- if and $scale.keda.prometheus (not $scale.enabled) }}
prefect.worker.autoscaling.keda.prometheus is given and prefect.worker.autoscaling.enabled is false, so nothing would be scaled; set it to true
{{- end }}
{{- end -}}

{{/* Of the metrics. */}}
{{- define "enginesmith.problems.metrics" -}}
{{- $monitor := .Values.metrics.serviceMonitor -}}
{{- if and $monitor.enabled (not .Values.metrics.enabled) }}
metrics.serviceMonitor.enabled is true and metrics.enabled is false: there is nothing to scrape; set metrics.enabled=true
{{- end }}
{{- if gt (include "enginesmith.milliseconds" $monitor.scrapeTimeout | int64) (include "enginesmith.milliseconds" $monitor.interval | int64) }}
metrics.serviceMonitor: scrapeTimeout {{ $monitor.scrapeTimeout }} is longer than interval {{ $monitor.interval }}, which Prometheus refuses; shorten it
{{- end }}
{{- end -}}

{{/* Of keys with nothing below them: Helm takes the default away, and templates would end in "nil pointer".
     Argument: (list path defaults values). files/defaults.json has the defaults, without those that may be null. */}}
{{- define "enginesmith.problems.nothing" -}}
{{- $values := index . 2 -}}
{{- $above := index . 0 -}}
{{- range $key, $default := index . 1 }}
{{- $path := printf "%s%s" $above $key }}
{{- $value := get $values $key }}
{{- if or (not (hasKey $values $key)) (kindIs "invalid" $value) }}
{{- $json := toJson $default }}
{{ $path }}: nothing is below this key, or null; remove the key for its default{{ if lt (len $json) 40 }}, or write {{ $path }}: {{ $json }}{{ end }}
{{- else if kindIs "map" $default }}
{{- include "enginesmith.problems.nothing" (list (printf "%s." $path) $default $value) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of a cron schedule: its five fields of numbers, names, lists, ranges and steps; ranges that end before they begin, and days
     that none of its months has. Kubernetes has Sunday as 0 alone, Prefect as 7 too. Argument: {path, schedule}. */}}
{{- define "enginesmith.problems.schedule" -}}
{{- $path := .path }}
{{- $schedule := .schedule }}
{{- $numbers := dict "sun" "0" "mon" "1" "tue" "2" "wed" "3" "thu" "4" "fri" "5" "sat" "6" "jan" "1" "feb" "2" "mar" "3" "apr" "4"
      "may" "5" "jun" "6" "jul" "7" "aug" "8" "sep" "9" "oct" "10" "nov" "11" "dec" "12" }}
{{- $first := 31 }}
{{- $last := 0 }}
{{- $allowed := list "[0-5]?[0-9]" "[01]?[0-9]|2[0-3]" "0?[1-9]|[12][0-9]|3[01]" "0?[1-9]|1[0-2]|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
      (printf "[0-%d]|sun|mon|tue|wed|thu|fri|sat" (ternary 6 7 (eq $path "ray.finishSchedule"))) }}
{{- $pattern := "" }}
{{- range $allowed }}{{ $item := printf "([*]|(%s)(-(%s))?)(/[1-9][0-9]?)?" . . }}{{ $pattern = printf "%s %s(,%s)*" $pattern $item $item }}{{ end }}
{{- if not (regexMatch (printf "^%s$" $pattern) (printf " %s" (lower $schedule))) }}
{{ $path }}: {{ $schedule | quote }} is not a cron schedule; give minute, hour, day, month and day of the week, such as "30 2 * * *"
{{- else }}
{{- range $place, $field := splitList " " $schedule }}
{{- range splitList "," $field }}
{{- $ends := splitList "/" . | first | lower | splitList "-" }}
{{- $from := get $numbers (first $ends) | default (first $ends) }}
{{- $to := get $numbers (last $ends) | default (last $ends) }}
{{- $all := or (eq $from "*") (and (contains "/" .) (eq $from $to)) }}
{{- if and (ne $from "*") (gt (float64 $from) (float64 $to)) (not (and (eq $place 4) (eq $to "0") (ne $path "ray.finishSchedule"))) }}
{{ $path }}: {{ . }} in {{ $schedule | quote }} ends before it begins; write two ranges with a comma
{{- end }}
{{- if eq $place 2 }}{{ $first = min $first (ternary 1 (float64 $from | int) (eq $from "*")) }}{{ end }}
{{- if eq $place 3 }}
{{- range untilStep (ternary 1 (float64 $from | int) $all) (ternary 13 (float64 $to | add1 | int) $all) 1 }}
{{- $last = max $last (index (list 0 31 29 31 30 31 30 31 31 30 31 30 31) .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- /* Kubernetes also takes the days of the week of such a schedule; Prefect's croniter finds none. */}}
{{- if and (gt $first $last) (or (hasSuffix " *" $schedule) (ne $path "ray.finishSchedule")) }}
{{ $path }}: {{ $schedule | quote }} has no day in any year; give a day that its months have
{{- end }}
{{- end }}
{{- end -}}
