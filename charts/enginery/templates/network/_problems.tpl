{{/* Not empty where a network ('10.0.0.1/24') has bits set beyond its prefix. */}}
{{- define "enginery.hostBits" -}}
{{- $address := splitList "/" . | first -}}
{{- $prefix := splitList "/" . | last | int -}}
{{- $six := contains ":" . -}}
{{- $width := ternary 16 8 $six -}}
{{- $units := splitList (ternary ":" "." $six) $address -}}
{{- if contains "::" $address -}}
{{- $left := without (splitList ":" (splitList "::" $address | first)) "" -}}
{{- $right := without (splitList ":" (splitList "::" $address | last)) "" -}}
{{- $between := list -}}
{{- range until (sub 8 (add (len $left) (len $right)) | int) }}{{ $between = append $between "0" }}{{ end -}}
{{- $units = concat $left $between $right -}}
{{- end -}}
{{- range $index, $unit := $units -}}
{{- $size := 1 -}}
{{- range until (min $width (max 0 (sub (mul $width (add1 $index)) $prefix)) | int) }}{{ $size = mul 2 $size }}{{ end -}}
{{- if mod (printf "%s%s" (ternary "0x" "" $six) $unit | int64) $size -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of network policies. An empty list allows nothing, and something must be reached. */}}
{{- define "enginery.problems.network" -}}
{{- $net := .Values.networkPolicy -}}
{{- $cidrs := dict -}}
{{- range $part := list "registry" "apiServer" "prefect" "postgresql" -}}
{{- $_ := set $cidrs (printf "%s.cidrs" $part) (index $net $part).cidrs -}}
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
{{- if include "enginery.hostBits" . }}
networkPolicy.{{ $path }}: {{ . }} has bits set beyond its prefix, which the API server refuses; set them to 0, or give one address as /32 or /128
{{- end }}
{{- end }}
{{- end }}
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
