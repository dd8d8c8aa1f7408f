# syntax=docker/dockerfile:1
# What a serving node needs: pull, which also follows a channel. For init containers, sidecars and, as `enginesmith initialize`, KServe's
# storage initializers; no torch, Ray or Prefect.
#
#   docker build --file images/client.Dockerfile --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:... .
#
# PYTHON_IMAGE has no default: what it is built on is chosen, by digest, by who builds it (docs/guides/kubernetes.md).
ARG PYTHON_IMAGE

FROM ${PYTHON_IMAGE} AS build
ARG PYTHON_IMAGE
# hadolint ignore=SC2016
RUN case "${PYTHON_IMAGE}" in *@sha256:*) ;; *) \
      echo "PYTHON_IMAGE=${PYTHON_IMAGE} is not pinned: give NAME:TAG@sha256:DIGEST" >&2; exit 1;; esac
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/enginesmith
COPY . .
RUN pip --python /opt/enginesmith/bin/python install --constraint constraints.txt ./enginesmith

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="enginesmith client" org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 enginesmith \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin enginesmith
COPY --from=build /opt/enginesmith /opt/enginesmith
ENV PATH=/opt/enginesmith/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
USER 10001:10001
RUN enginesmith --version
ENTRYPOINT ["enginesmith"]
CMD ["--help"]
