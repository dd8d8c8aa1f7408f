{{/* The bits of a network's address ('10.0.0.0/24'), 32 or 128 characters; nothing where it is none (RFC 4632, RFC 4291). */}}
{{- define "enginesmith.bits" -}}
{{- $address := splitList "/" . | first -}}
{{- $six := contains ":" . -}}
{{- $count := ternary 8 4 $six -}}
{{- $units := splitList (ternary ":" "." $six) $address -}}
{{- $whole := le (splitList "/" . | last | int) (ternary 128 32 $six) -}}
{{- if contains "::" $address -}}
{{- $halves := list -}}
{{- range splitList "::" $address }}{{ $halves = append $halves (ternary list (splitList ":" .) (eq . "")) }}{{ end -}}
{{- $missing := sub 8 (add (len (first $halves)) (len (last $halves))) -}}
{{- $whole = and $whole (eq (len $halves) 2) (gt $missing 0) -}}
{{- $units = first $halves -}}
{{- range until (max 0 $missing | int) }}{{ $units = append $units "0" }}{{ end -}}
{{- $units = concat $units (last $halves) -}}
{{- end -}}
{{- $whole = and $whole (eq (len $units) $count) -}}
{{- $bits := "" -}}
{{- range $units -}}
{{- $number := printf "%s%s" (ternary "0x" "" $six) . | int64 -}}
{{- $whole = and $whole (regexMatch (ternary "^[0-9a-fA-F]{1,4}$" "^(0|[1-9][0-9]{0,2})$" $six) .) (or $six (le $number 255)) -}}
{{- $bits = printf (ternary "%s%016b" "%s%08b" $six) $bits $number -}}
{{- end -}}
{{- if $whole }}{{ $bits }}{{ end -}}
{{- end -}}

{{/* What is wrong with a network, or nothing: the API server refuses these. */}}
{{- define "enginesmith.networkProblem" -}}
{{- $bits := include "enginesmith.bits" . -}}
{{- if not $bits -}}
is not a network; give an address and bits, as 10.0.0.0/8 or fd00::/8
{{- else if hasPrefix (printf "%080d%016b" 0 65535) $bits -}}
is an IPv4 network in the form of IPv6; give its IPv4 form
{{- else if contains "1" (substr (splitList "/" . | last | int) (len $bits) $bits) -}}
has bits set beyond its prefix; set them to 0, or give one address as /{{ len $bits }}
{{- end -}}
{{- end -}}

{{/* Of the peers of a policy. Argument: {path, peers}. */}}
{{- define "enginesmith.problems.peers" -}}
{{- $path := .path -}}
{{- range .peers }}
{{- with .ipBlock }}
{{- $cidr := .cidr }}
{{- range prepend (.except | default list) $cidr }}
{{- $network := . }}
{{- with include "enginesmith.networkProblem" . }}
{{ $path }}: {{ $network }} {{ . }}
{{- end }}
{{- end }}
{{- $prefix := splitList "/" $cidr | last | int }}
{{- $block := include "enginesmith.bits" $cidr }}
{{- range .except }}
{{- $bits := include "enginesmith.bits" . }}
{{- if not (and (gt (splitList "/" . | last | int) $prefix) (eq (len $bits) (len $block)) (hasPrefix (substr 0 $prefix $block) $bits)) }}
{{ $path }}: except {{ . }} is not within {{ $cidr }}; give a smaller network of it, or remove it
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of network policies. An empty list allows nothing, and something must be reached. */}}
{{- define "enginesmith.problems.network" -}}
{{- $net := .Values.networkPolicy -}}
{{- range $path, $address := dict "registry.endpoint" .Values.registry.endpoint "nodeCache.through" .Values.nodeCache.through
      "catalog.place" .Values.catalog.place "canary.traffic" .Values.canary.traffic "prefect.worker.autoscaling.keda.prometheus" .Values.prefect.worker.autoscaling.keda.prometheus "prefect.externalApi.url" .Values.prefect.externalApi.url
      "prefect.server.uiApiUrl" .Values.prefect.server.uiApiUrl "proxy.http" .Values.proxy.http "proxy.https" .Values.proxy.https
      "ray.gcsFaultTolerance.redisAddress" .Values.ray.gcsFaultTolerance.redisAddress }}
{{- range include "enginesmith.ports" (list $address) | fromJsonArray }}
{{- if or (lt (int64 .) 1) (gt (int64 .) 65535) }}
{{ $path }}: {{ $address }} has port {{ int64 . }}; ports are 1 to 65535
{{- end }}
{{- end }}
{{- end }}
{{- range $part, $values := $net }}
{{- if kindIs "map" $values }}
{{- $blocks := list }}
{{- range $values.cidrs }}{{ $blocks = append $blocks (dict "ipBlock" (dict "cidr" .)) }}{{ end }}
{{- range $field, $peers := dict "cidrs" $blocks "from" $values.from }}
{{- include "enginesmith.problems.peers" (dict "path" (printf "networkPolicy.%s.%s" $part $field) "peers" $peers) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $net.extraEgress }}
{{- include "enginesmith.problems.peers" (dict "path" "networkPolicy.extraEgress" "peers" .to) }}
{{- range .ports }}
{{- if and .endPort (lt (int .endPort) (int .port)) }}
networkPolicy.extraEgress: endPort {{ .endPort }} is less than port {{ .port }}; give the larger one as endPort
{{- end }}
{{- end }}
{{- end }}
{{- if and $net.enabled (not $net.extraEgress) }}
{{- if and (include "enginesmith.usesBuckets" .) (not $net.registry.cidrs) (not $net.registry.namespaceSelector) }}
networkPolicy.registry has neither cidrs nor namespaceSelector, so nothing could reach the bucket; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- if and (or .Values.proxy.http .Values.proxy.https) (not $net.proxy.cidrs) }}
networkPolicy.proxy.cidrs is empty, so nothing could reach the proxy; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- if and (not .Values.prefect.server.enabled) (not $net.prefect.cidrs) }}
networkPolicy.prefect.cidrs is empty, so nothing could reach prefect.externalApi.url; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- if and (or (and .Values.ray.enabled .Values.ray.gcsFaultTolerance.redisAddress) (and .Values.prefect.server.enabled .Values.prefect.server.redis.existingSecret)) (not $net.redis.cidrs) }}
networkPolicy.redis.cidrs is empty, so nothing could reach the Redis; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- if and .Values.prefect.server.enabled .Values.prefect.server.postgresql.existingSecret (not $net.postgresql.cidrs) }}
networkPolicy.postgresql.cidrs is empty, so the Prefect server could not reach its database; name where it is, there or in networkPolicy.extraEgress
{{- end }}
{{- end }}
{{- end -}}
