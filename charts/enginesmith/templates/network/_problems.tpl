{{/* What is wrong with a network ('10.0.0.1/24'), or nothing: the API server refuses these (RFC 4632, RFC 4291). */}}
{{- define "enginesmith.networkProblem" -}}
{{- $address := splitList "/" . | first -}}
{{- $prefix := splitList "/" . | last | int -}}
{{- $six := contains ":" . -}}
{{- $width := ternary 16 8 $six -}}
{{- $count := ternary 8 4 $six -}}
{{- $units := splitList (ternary ":" "." $six) $address -}}
{{- $whole := le $prefix (ternary 128 32 $six) -}}
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
{{- $beyond := false -}}
{{- range $index, $unit := $units -}}
{{- if regexMatch (ternary "^[0-9a-fA-F]{1,4}$" "^(0|[1-9][0-9]{0,2})$" $six) $unit -}}
{{- $number := printf "%s%s" (ternary "0x" "" $six) $unit | int64 -}}
{{- $whole = and $whole (or $six (le $number 255)) -}}
{{- $size := 1 -}}
{{- range until (min $width (max 0 (sub (mul $width (add1 $index)) $prefix)) | int) }}{{ $size = mul 2 $size }}{{ end -}}
{{- $beyond = or $beyond (ne (mod $number $size) 0) -}}
{{- else -}}
{{- $whole = false -}}
{{- end -}}
{{- end -}}
{{- if not $whole -}}
is no network; give an address and bits, as 10.0.0.0/8 or fd00::/8
{{- else if $beyond -}}
has bits set beyond its prefix; set them to 0, or give one address as /{{ ternary 128 32 $six }}
{{- end -}}
{{- end -}}

{{/* Of network policies. An empty list allows nothing, and something must be reached. */}}
{{- define "enginesmith.problems.network" -}}
{{- $net := .Values.networkPolicy -}}
{{- $cidrs := dict -}}
{{- range $part, $values := $net -}}
{{- if kindIs "map" $values }}{{ $_ := set $cidrs (printf "%s.cidrs" $part) ($values.cidrs | default list) }}{{ end -}}
{{- end -}}
{{- $peers := list -}}
{{- range $net.extraEgress }}{{ $peers = concat $peers .to }}{{ end -}}
{{- range $part, $from := dict "prefect.from" $net.prefect.from "kuberay.from" $net.kuberay.from "metrics.from" $net.metrics.from "extraEgress" $peers -}}
{{- $found := list -}}
{{- range $from }}{{ with .ipBlock }}{{ $found = concat $found (prepend (.except | default list) .cidr) }}{{ end }}{{ end -}}
{{- $_ := set $cidrs $part $found -}}
{{- end -}}
{{- range $path, $found := $cidrs }}
{{- range $found }}
{{- $cidr := . }}
{{- with include "enginesmith.networkProblem" . }}
networkPolicy.{{ $path }}: {{ $cidr }} {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $net.enabled (not $net.extraEgress) }}
{{- if and (include "enginesmith.usesBuckets" .) (not $net.registry.cidrs) (not $net.registry.namespaceSelector) }}
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
