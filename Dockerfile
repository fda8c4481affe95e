# docker build -t linearize . && docker run --rm linearize demo; TORCH is what pip is told to install as torch.
FROM python:3.12-slim
ARG TORCH="torch==2.13.0"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY linearize linearize
COPY kernels kernels
COPY recipes recipes
RUN pip install --no-cache-dir "$TORCH" && pip install --no-cache-dir ".[train,vision]"
WORKDIR /data
ENV HF_HOME=/data/huggingface
ENTRYPOINT ["linearize"]
CMD ["--help"]
