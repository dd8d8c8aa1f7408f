# syntax=docker/dockerfile:1
# Builds and proofs on a GPU: a Ray worker, and the flow runs that prove engines. NVIDIA's CUDA base, full TensorRT.
#
#   docker build --file images/worker.Dockerfile \
#     --build-arg CUDA_IMAGE=nvcr.io/nvidia/cuda:13.0.1-base-ubi9@sha256:... .
#
# CUDA_IMAGE has no default: what it is built on is chosen, by digest, by who builds it (docs/guides/kubernetes.md). It is one of the
# UBI 9 images, which have Python 3.11: Ray wants the same Python on all its nodes as in the control image.
ARG CUDA_IMAGE

FROM ${CUDA_IMAGE} AS build
ARG CUDA_IMAGE
# hadolint ignore=SC2016
RUN case "${CUDA_IMAGE}" in *@sha256:*) ;; *) \
      echo "CUDA_IMAGE=${CUDA_IMAGE} is not pinned: give NAME:TAG@sha256:DIGEST" >&2; exit 1;; esac
# hadolint ignore=DL3041
RUN dnf install --assumeyes --setopt=install_weak_deps=False python3.11 python3.11-pip && dnf clean all
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3.11 -m venv /opt/enginesmith
ENV PATH=/opt/enginesmith/bin:$PATH
COPY . .
RUN pip install --constraint constraints.txt ./enginesmith '.[worker]'
# On its own: two gigabytes, which its installer fetches from NVIDIA's index.
# hadolint ignore=DL3059
RUN pip install --constraint constraints.txt ./enginesmith '.[tensorrt]'

FROM ${CUDA_IMAGE}
LABEL org.opencontainers.image.title="enginesmith worker" org.opencontainers.image.licenses="Apache-2.0"
# wget: KubeRay's probes of Ray. libgomp: onnxruntime and torch.
# hadolint ignore=DL3041
RUN dnf install --assumeyes --setopt=install_weak_deps=False libgomp python3.11 shadow-utils wget \
 && dnf clean all \
 && groupadd --gid 10001 enginesmith \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /sbin/nologin enginesmith
COPY --from=build /opt/enginesmith /opt/enginesmith
ENV PATH=/opt/enginesmith/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
USER 10001:10001
RUN enginesmith doctor
CMD ["enginesmith", "--help"]
