# syntax=docker/dockerfile:1
# The image of `dflash-serve build`, which quantises drafters and makes checkpoints; it serves nothing.
#
#   docker buildx build -f deploy/docker/engines.Dockerfile --build-arg PYTHON=python@sha256:... -t dflash-serve-engines:0.3.0 .
#
# PYTHON        the base image, by digest; there is no default, so that every build is pinned
# TORCH         the requirement of PyTorch for pip
# TORCH_INDEX   the package index: .../whl/cpu, or .../whl/cu130 for GPUs
ARG PYTHON

FROM ${PYTHON} AS build
ARG PYTHON
# A tag can move to another image.
RUN case "$PYTHON" in *@sha256:*) ;; *) echo "PYTHON must be pinned by digest: python@sha256:..." >&2; exit 2 ;; esac
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/dflash-serve
ENV PATH=/opt/dflash-serve/bin:$PATH
# Before our own sources, so that a change of them does not download PyTorch again.
# hadolint ignore=DL3013
RUN pip install --index-url "$TORCH_INDEX" "$TORCH"
COPY pyproject.toml README.md LICENSE /src/
COPY dflash_serve /src/dflash_serve
COPY backends /src/backends
COPY engines /src/engines
COPY deploy/helm /src/deploy/helm
# hadolint ignore=DL3013
RUN pip install "/src[engines]" && \
    pip uninstall --yes pip

FROM ${PYTHON}
ARG VERSION=0.3.0
ARG REVISION=unknown
ARG PYTHON
LABEL org.opencontainers.image.title="dflash-serve, builds" \
      org.opencontainers.image.description="Quantised drafters, checkpoints and graphs for DFlash, from a recipe" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$PYTHON"
# Folders that a container may write; volumes mounted there keep this owner.
RUN install -d -o 10001 -g 10001 /models /cache /prepared
COPY --from=build /opt/dflash-serve /opt/dflash-serve
ENV PATH=/opt/dflash-serve/bin:$PATH \
    HOME=/cache \
    USER=dflash \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/models/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /cache
HEALTHCHECK NONE
ENTRYPOINT ["dflash-serve"]
CMD ["build", "--help"]
