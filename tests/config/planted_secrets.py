"""Secrets that no service ever issued, and harmless strings of configurations, for the tests of redaction.

Nothing here is a real token: bodies are drawn from a seed when the module is imported, so that no scanner of
repositories finds one in this file.
"""

from __future__ import annotations

import random
import re
import string

_ALPHABETS = {
    "": string.ascii_letters + string.digits,
    "h": "0123456789abcdef",
    "l": string.ascii_lowercase + string.digits,
    "U": string.ascii_uppercase + string.digits,
    "w": string.ascii_letters + string.digits + "-_",
    "b": string.ascii_letters + string.digits + "+/",
    "d": string.digits,
}


def draw(shape: str, rng: random.Random) -> str:
    """`ghp_<36>` with 36 letters and digits; `<h40>` hexadecimal, `<w43>` and `<b43>` Base64, `<U16>` capitals."""
    return re.sub(r"<([a-zA-Z]?)(\d+)>", lambda m: "".join(rng.choices(_ALPHABETS[m[1]], k=int(m[2]))), shape)


SHAPES = """
AKIA<U16>
ASIA<U16>
ABIA<U16>
ACCA<U16>
LTAI<20>
AIza<35>
ya29.<w60>
GOCSPX-<28>
EAACEdEose0cBA<120>
dop_v1_<h64>
doo_v1_<h64>
dapi<h32>
AGE-SECRET-KEY-1<U58>
patA<13>.<h64>
p8e-<32>
sk-ant-api03-<w93>AA
sk-ant-admin01-<w93>AA
sk-<48>
sk-proj-<w74>T3BlbkFJ<w74>
sk-svcacct-<w58>T3BlbkFJ<w58>
sk-or-v1-<h64>
sk-lf-<h8>-<h4>-<h4>-<h4>-<h12>
AKCp<69>
ATATT3<w180>
ATCTT3<w180>
v1.0-<h24>-<h146>
dp.pt.<43>
duffel_live_<43>
dt0c01.<U24>.<U64>
EZAK<54>
FLWSECK_TEST-<h32>-X
fio-u-<w64>
ghp_<36>
gho_<36>
ghs_<36>
ghu_<36>
ghr_<36>
github_pat_<22>_<59>
glpat-<w20>
gldt-<w20>
glft-<w20>
glrt-<w20>
glsoat-<w20>
glptt-<h40>
glagent-<w50>
gloas-<h64>
glcbt-<h2>_<w20>
glimt-<l25>
GR1348941<w20>
glc_<60>
glsa_<32>_<h8>
<14>.atlasv1.<w64>
HRKU-AA<w58>
pat-na1-<h8>-<h4>-<h4>-<h4>-<h12>
hf_<34>
api_org_<34>
ico-<32>
lin_api_<40>
<h32>-us12
key-<h32>
<6>_<29>_mmk
https://acme.webhook.office.com/webhookb2/<h32>/IncomingWebhook/<h32>/<h32>
NRAK-<U27>
NRJS-<h19>
ntn_<d11><35>
secret_<43>
npm_<36>
API-<U26>
sha256~<w43>
pplx-<48>
pscale_tkn_<w43>
pscale_pw_<w43>
PMAK-<h24>-<h34>
pnu_<36>
pul-<h40>
pypi-AgEIcHlwaS5vcmc<w120>
rdme_<l70>
rubygems_<h48>
tk-us-<w48>
SG.<w22>.<w43>
xkeysib-<h64>-<16>
sntryu_<h64>
sm_aat_<16>
shippo_live_<h40>
shpat_<h32>
shpss_<h32>
xoxb-<d12>-<d12>-<24>
xoxp-<d12>-<d12>-<d12>-<h32>
xapp-1-A<U10>-<d13>-<h64>
https://hooks.slack.com/services/T<U8>/B<U8>/<24>
https://discord.com/api/webhooks/<d18>/<w68>
M<24>.<w6>.<w27>
sqp_<h40>
squ_<h40>
sgp_<h40>
sq0atp-<w22>
sq0csp-<w43>
sk_live_<24>
rk_live_<24>
sk_test_<24>
<d10>:AA<w33>
SK<h32>
AC<h32>
tfp_<w44>_<14>
hvs.<w95>
hvb.<w140>
AQVN<w35>
nvapi-<w64>
xai-<80>
gsk_<52>
r8_<37>
tvly-dev-<32>
jina_<60>
lsv2_pt_<h32>_<h10>
fc-<h32>
e2b_<h40>
fw_<24>
tgp_v1_<w43>
pcsk_<6>_<50>
csk-<l48>
rpa_<U46>
wandb_v1_<w70>
sbp_<h40>
tskey-auth-<12>CNTRL-<32>
figd_<w40>
dckr_pat_<w27>
nfp_<36>
phx_<47>
re_<8>_<24>
AccountKey=<b86>==
eyJ<30>.eyJ<60>.<w43>
curl -u me:<16> https://h
https://h/x?X-Amz-Date=1&X-Amz-Signature=<h64>
redis://:<20>@cache:6379/0
postgresql://me:<20>@db/x
""".strip().splitlines()
"""Tokens by the form that their service documents."""

RANDOM_SHAPES = ["<16>", "<20>", "<24>", "<32>", "<40>", "<64>", "<h32>", "<h40>", "<h64>", "<l20>", "<l32>", "<b40>",
          "<w43>", "<b86>==", "<U32>", "<h8>-<h4>-<h4>-<h4>-<h12>"]  # fmt: skip
"""What a key looks like that begins with nothing: of Mistral, W&B, Serper, Exa, Azure, Cohere, AWS."""

HARMLESS = r"""
Qwen/Qwen2.5-0.5B-Instruct
Qwen/Qwen3-30B-A3B-Instruct-2507-FP8
Qwen/Qwen3-VL-235B-A22B-Thinking
Qwen/Qwen3-Coder-480B-A35B-Instruct
Qwen2.5-Math-RM-72B
Qwen/QwQ-32B-AWQ
meta-llama/Meta-Llama-3.1-8B-Instruct
meta-llama/Llama-3.2-11B-Vision-Instruct
meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8
nvidia/Llama-3_3-Nemotron-Super-49B-v1_5
nvidia/DeepSeek-R1-0528-NVFP4-v2
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B
deepseek-ai/DeepSeek-V3.2-Exp
mistralai/Mixtral-8x7B-Instruct-v0.1
mistralai/Mistral-Small-3.2-24B-Instruct-2506
hf-internal-testing/tiny-random-LlamaForCausalLM
google/gemma-3n-E4B-it
google/flan-t5-xxl
openai/gpt-oss-120b
gpt-4o-mini-2024-07-18
gpt-4.1-nano-2025-04-14
claude-sonnet-4-20250514
gemini-2.5-flash-lite-preview-09-2025
moonshotai/Kimi-K2-Instruct-0905
zai-org/GLM-4.5-Air-FP8
THUDM/glm-4-9b-chat-1m
microsoft/Phi-3.5-mini-instruct
allenai/OLMo-2-1124-13B-Instruct
HuggingFaceTB/SmolLM2-1.7B-Instruct
Skywork/Skywork-Reward-V2-Llama-3.1-8B
bge-reranker-v2-m3
intfloat/e5-mistral-7b-instruct
Alibaba-NLP/gte-Qwen2-7B-instruct
sentence-transformers/all-MiniLM-L6-v2
TheBloke/Llama-2-70B-Chat-GPTQ
unsloth/Qwen3-14B-unsloth-bnb-4bit
bartowski/Qwen2.5-7B-Instruct-1M-Q4_K_M.gguf
data/gsm8k/train.parquet
./data/math_500_level5.jsonl
../rewards/my_reward.py:compute_score
~/checkpoints/qwen3-8b-grpo/global_step_100/actor
/mnt/nfs/users/ada/experiments/2024-11-02_grpo_lr1e-6_kl0.001/hf
/scratch/job_1234567/tmp.x7Yz2kQ
/home/me/hf_cache2/x1y2z3
/data/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218
models/model-00001-of-00030.safetensors
/usr/local/cuda-12.9/lib64/libcudart.so.12
C:\Users\ada\runs\first
s3://my-bucket/datasets/v2/part-00017.parquet
gs://lab-data/rl/2025-06-01/rollouts
hdfs://namenode:9000/user/ada/corpus
file:///tmp/rendezvous_4711
sqlite:///mlflow.db
verl_mt://tiny
hf://datasets/openai/gsm8k@main/main/train.parquet
git@github.com:org/repo.git
https://github.com/org/repo/tree/b968826d9c46dd6066d109eabc6255188de91218/src
git+https://github.com/org/repo@b968826d9c46dd6066d109eabc6255188de91218
image@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
http://localhost:30000/generate
http://10.0.0.17:8000/v1/chat/completions
http://[::1]:8000/a@b
https://api.openai.com/v1
https://judge.internal.example.com:8443/score?model=qwen3&n=4
https://h/v1?max_tokens=5&key=prompt&page=2#key=3
tcp://gpu-node-17b3.cluster.local:29500
grpc://[fe80::1%25eth0]:50051
192.168.178.12
2001:db8::8a2e:370:7334
ada@example.org
nccl
flashinfer_cutlass_mla
flashinfer_trtllm
fp8_e4m3fn
torch.float8_e4m3fnuz
torch.bfloat16
compressed-tensors
w4a16g128
lm_head.weight
model.layers.31.self_attn.q_proj.weight
qwen3_coder
deepseekv31
verl_mt.rewards.gsm8k.compute_score
my_package.rewards.judge:LlmJudge
transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer
XLMRobertaForTokenClassification
MBartForConditionalGeneration
DataParallelPPOActorRolloutRefWorker
TensorRTLLMBackendHTTPServerV2
AutoModelForSpeechSeq2Seq
parseISO8601TimestampToUTC
layernorm_before_attention_and_mlp
convert_hf_checkpoint_to_megatron
--tp 8 --mem-fraction-static 0.85
--token-ids 5 --max-tokens 512
0.5.6rc1+cu128
2.8.0+cu129.post1
flash_attn-2.8.3+cu12torch2.8cxx11abiFALSE-cp311-cp311-linux_x86_64.whl
torch==2.13.0
transformers>=5.12,<6
v1.0-rc2
1.2.3-alpha.4+build.567
python3.11
sm_90a
9.0;10.0+PTX
NVIDIA H100 80GB HBM3
H200-141GB-SXM5
n1-standard-96
a3-megagpu-8g
p5en.48xlarge
cuda:0
cpu:gloo,cuda:nccl
0,1,2,3,4,5,6,7
2024-01-31T12:00:00Z
20240131T120000Z
20240131_120000_123456
2025-06-01 17:03:59.123456+00:00
12:30:45
1234567890123456
0000000000000000
3.141592653589793
1e-06
-1
0x1f
1_000_000
10%
512MiB
30s
1h30m
100k
true
null
None
auto
INFO
bfloat16
gsm8k
math_dapo
humaneval_plus_v0.1.10
livecodebench_v6_2024-08_2025-05
aime_2024_2025_avg@32
grpo-qwen3-8b-lr1e-6-bs256-n16
hf_qwen3_8b_grpo
sk-learn-2
sk-SK
task-1
risk-averse-policy-of-2025
desk-top-computer
pypi-server
npm_install
xai-grok
gsk_model
SG.x
AKIA
eyJust a word
r8_rank
shipping-label-maker
key-value-store
secret_santa
re_ranker_v2
fw_bw_overlap
fc-layer
API-reference
lin_api_design
dapi
api_organisation
pul-request
pat-terns
secret-keeper
hvs.x
tgp_v1_
csk-model
glc_model
figd_layer
<think>
</tool_call>
<|im_start|>assistant
<|begin_of_sentence|>
<|reserved_special_token_128|>
[INST]
### Response:
\boxed{
\boxed\{(.+?)\}
(?i)answer\s*[:=]\s*(-?\d+(?:\.\d+)?)
^[A-Za-z0-9_-]{16,}$
{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}
{% set image_token=x1 %}{{ bos_token }}{%- set auth='abc' %} --token abc
{"type": "json_schema", "name": "answer", "strict": true}
{"token_count": "many", "author": "Ada"}
{"temperature": 0.7, "top_p": 0.95}
lambda x: x.strip().lower()
def f(a, b=2): return a + b
Answer with one letter: A, B, C or D.
You are a careful judge. Score the answer from 0 to 10.
Reply in JSON: {"score": <int>, "reason": <text>}
Write the answer as token=<answer>. The bearer of this key: none.
Note: password
Password:
Token: none
key: value12345
a: ***
x=***
***
---
user:
Human:
Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz
Donaudampfschifffahrtsgesellschaftskapitän
internationalization
antidisestablishmentarianism
你好，世界
これはテストです
50 % of $10
a+b=c
x^2 + y^2 = z^2
\frac{1}{2}\sqrt{3}
A/B/C/D
train[:80%]
main[100:200]
reward_fn@v2
*.safetensors
**/*.py
user_prompt
extra_info.ground_truth
row["answer"]
12345678:30
1000:1000x/y
docker run -u 1000:1000x/y --user me
curl -s http://localhost:8000/health
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --port 30000
OMP_NUM_THREADS=8 python train.py
export CUDA_VISIBLE_DEVICES=0,1
max_tokens=512
temperature=0.7
num_tokens: 5
seed=42
lr=1e-6
eos_token=</s>
aa:bb:cc:dd:ee:ff
trainer-7d9f8b6c5-x2x9k
ip-10-0-12-34.us-west-2.compute.internal
ray://head-node:10001
slurm_job_8812345_rank_17
lora_r64_alpha128_dropout0.05
ABCDEFGHIJKLMNOPQRSTUVWXYZ
abcdefghijklmnopqrstuvwxyz0123456789
HunYuanMoEV1Model
Wav2Vec2BertForCTC
SeamlessM4Tv2ForTextToText
Qwen3OmniMoeCode2Wav
NllbMoeSparseMLP
xLSTMForCausalLM
PPLCNetV3Backbone
fc-layer2-head8-dim64-kv4-q32
key-value-store-benchmark-2025
secret_santa_2025_train_file_v2
""".strip().splitlines()
"""Model names, paths, addresses, identifiers, versions, dates, numbers, templates, sentences, regular expressions."""

HARMLESS_NAMED = {
    "revision": "b968826d9c46dd6066d109eabc6255188de91218",
    "git_commit": "9c46dd6066d109eabc6255188de91218b968826d",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "run_id": "8f14e45f-ceea-467f-a0e6-1b2c3d4e5f60",
    "uuid": "0f8fad5b-d9cb-469f-a165-70867728950e",
    "wandb_run_id": "3k2j9d8sx1y2z3a4",
    "model": "hf_mistral7b",
    "path": "sk-2025-train",
    "config_hash": "d41d8cd98f00b204e9800998ecf8427e",
}
"""What looks random and is public, under a name that says so."""


def planted() -> dict[str, str]:
    """Each shape with a token of it, the same in every process."""
    rng = random.Random(0)
    return {shape: draw(shape, rng) for shape in SHAPES}
