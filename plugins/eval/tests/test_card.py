"""Model cards, and their upload to a server that speaks as much of the Hub's protocol as an upload needs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading

import pytest
import yaml
from aiohttp import web
from huggingface_hub import ModelCard, constants
from rlplug_eval.card import write_card
from rlplug_eval.commands.export import config_of, export_command
from rlplug_eval.hub import push

from rlplug.errors import ConfigError, RunError

HOSTILE = "x\n---\nlicense: mit\n---\n# Title <script>alert(1)</script> ```` | `a` [b](javascript:c) "


def make_run(folder, base, algorithm="rlplug_algos.grpo.GRPO", prompt_key="prompt", **policy):
    folder.mkdir()
    data = {"train": {"class_path": "rlplug.data.sources.FileSource", "init_args": {"path": "/home/a/t.jsonl"}}}
    data["train"]["init_args"]["prompt_key"] = prompt_key
    reward = {"class_path": "judge.Judge", "init_args": {"api_key": "sk-123", "url": "http://judge", "token": "sk-123"}}
    model = {"policy": {"path": str(base), **policy}, "algorithm": {"class_path": algorithm}, "rewards": [reward]}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    (folder / "run.json").write_text(json.dumps({"versions": {"rlplug": "0.1.0", "torch": "2.13", "black": "1"}}))
    write_metrics(folder, ({"reward/mean": step / 40, "completion/length_mean": step % 7} for step in range(1, 41)))
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text("{}")
    return folder


def write_metrics(folder, steps):
    lines = (json.dumps({"step": step} | metrics) + "\n" for step, metrics in enumerate(steps, 1))
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_a_card_has_what_the_hub_reads_and_the_licence_of_the_base(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    run = make_run(tmp_path / "run", base)
    card = ModelCard.load(write_card(run, run / "policy"))
    assert (card.data.license, card.data.library_name) == ("unknown", "transformers")
    assert "Licence of the base model: unknown" in card.text
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    card = ModelCard.load(write_card(run, run / "policy"))
    assert card.data.license == "apache-2.0"
    assert card.data.base_model is None, "a folder's name is none on the Hub"
    assert "from 0.075 to 0.950 (first and last 5)" in card.text
    assert card.text.count("\n| ") == 2 + 12
    assert "t.jsonl" in card.text
    assert "/home/a" not in card.text
    assert "sk-123" not in card.content
    assert "torch 2.13" in card.text
    assert "black" not in card.text
    (run / "policy" / "adapter_config.json").write_text("{}")
    assert ModelCard.load(write_card(run, run / "policy")).data.library_name == "peft"


def test_a_card_leaves_out_numbers_that_are_not_finite(tmp_path):
    """It catches a run that ends with an error, because one validation or step had no reward at all."""
    run = make_run(tmp_path / "run", "Qwen/Qwen3-0.6B-Base")
    names, nan = ("reward/mean", "validate/reward_mean", "validate/pass@1"), "NaN"
    rows = [(nan, 0.25, 0.125), (0.5, nan, nan), (0.75, 0.5, nan), ("Infinity", 1.0, 0.5)]
    write_metrics(run, (dict(zip(names, row, strict=True)) for row in rows))
    text = write_card(run, run / "policy").read_text()
    assert "Mean reward of 2 steps, from 0.500 to 0.750" in text
    assert "| 1 |  | 0.250 | 0.125 |\n| 3 | 0.750 | 0.500 |  |\n| 4 |  | 1 | 0.500 |\n" in text
    write_metrics(run, [dict.fromkeys(names, nan), dict.fromkeys(names[1:], 0.5)])
    assert "## Curve" not in write_card(run, run / "policy").read_text()


def test_a_name_on_the_hub_is_the_base_model(tmp_path):
    run = make_run(tmp_path / "run", "Qwen/Qwen3-0.6B-Base")
    card = ModelCard.load(write_card(run, run / "policy"))
    assert (card.data.base_model, card.data.license) == ("Qwen/Qwen3-0.6B-Base", "unknown")
    scratch = make_run(tmp_path / "scratch", "examples/model", init="random")
    assert ModelCard.load(write_card(scratch, scratch / "policy")).data.base_model is None


def test_hostile_text_of_a_run_neither_leaves_its_place_nor_reaches_the_front_matter(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: 'mit\\n---'\n---\n")
    run = make_run(tmp_path / "run", base, algorithm=f"a.{HOSTILE}", prompt_key=HOSTILE)
    card = ModelCard.load(write_card(run, run / "policy"))
    assert card.data.license == "unknown"
    assert card.content.count("\n---\n") == 1, "one end of the front matter"
    assert card.data.tags == ["rlplug", "reinforcement-learning"]
    outside, inside, fence = [], False, ""
    for line in card.text.splitlines():
        marks = line[: len(line) - len(line.lstrip("`"))]
        if not inside and len(marks) >= 3:
            inside, fence = True, marks
        elif inside and line.strip() == fence:
            inside = False
        elif not inside:
            outside.append(line)
    assert not inside
    assert not [line for line in outside if "<script>" in line.replace("\\<script\\>", "")]
    assert not [line for line in outside if "[b](" in line.replace("\\[b\\](", "")]


# ---- the Hub --------------------------------------------------------------------------------------------------------


class FakeHub:
    """Server with one repository, which takes a token and files as commits and in LFS."""

    def __init__(self, refuses=False):
        self.refuses = refuses
        self.created, self.files, self.large, self.tokens = [], {}, {}, set()
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(10)

    def _run(self, started):
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)

        async def start():
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def close(self):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _answer(self, request):
        path, body = request.path, await request.read()
        self.tokens.add(request.headers.get("Authorization", ""))
        if self.refuses:
            return web.json_response({"error": "You don't have the rights"}, status=403)
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return web.json_response({"url": f"{self.url}/me/policy", "name": "me/policy"})
        if path == "/api/validate-yaml":
            return web.json_response({"errors": [], "warnings": []})
        if "/preupload/" in path:
            asked = [each["path"] for each in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "lfs" if p.endswith("tensors") else "regular"} for p in asked]
            return web.json_response({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/store/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            return web.json_response({"transfer": "basic", "objects": objects})
        if path.startswith("/store/"):
            self.large[path.rpartition("/")[2]] = body
            return web.Response()
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.large[value["oid"]]
            return web.json_response({"commitUrl": f"{self.url}/me/policy/commit/1", "commitOid": "1"})
        if path.startswith("/api/models/"):
            return web.json_response({"id": "me/policy", "sha": "0" * 40, "siblings": [], "private": True})
        return web.json_response({"error": path}, status=404)


@pytest.fixture
def hub(monkeypatch):
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.close()


def test_an_upload_sends_every_file_and_changes_none(tmp_path, hub, capfd):
    folder = tmp_path / "policy"
    folder.mkdir()
    content = {
        "README.md": b"---\nlicense: mit\n---\n",
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 9,
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    (folder / ".secret").write_text("no")
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert push(folder, "me/policy", is_private=True).endswith("/me/policy")
    assert hub.files == content
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    assert "Bearer hf_secret" in hub.tokens
    assert before == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    hub.refuses = True
    with pytest.raises(RunError, match=r"refuses: .*(rights|403)") as refused:
        push(folder, "me/policy", is_private=True)
    output = capfd.readouterr()
    assert "hf_secret" not in f"{refused.value}{output.out}{output.err}"
    with pytest.raises(ConfigError, match="--push-to-hub a b"):
        push(folder, "a b", is_private=True)


def test_links_are_neither_copied_nor_uploaded(tmp_path):
    """Catches an export of what links lead to, such as keys: a run that somebody sent may hold any."""
    run = make_run(tmp_path / "run", tmp_path)
    (tmp_path / "key").write_text("mine")
    (run / "policy" / "notes").symlink_to(tmp_path / "key")
    for act in (
        lambda: export_command([str(run), "--to", str(tmp_path / "out")]),
        lambda: export_command([str(run), "--push-to-hub", "me/policy"]),
        lambda: push(run / "policy", "me/policy", is_private=True),
    ):
        with pytest.raises(ConfigError, match=r"has links.*policy/notes"):
            act()
    assert not (tmp_path / "out").exists()


def test_an_export_imports_nothing_that_the_run_names(tmp_path, monkeypatch):
    """Catches a configuration that runs as a program where only its model is read."""
    (tmp_path / "of_the_run.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = {"policy": {"path": "a/model", "init": "random"}, "algorithm": "of_the_run.Algorithm"}
    model |= {"rewards": [{"class_path": "of_the_run.Reward"}], "lora": {"rank": 4}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": model, "data": {"train": "of_the_run.Source"}}))
    config = config_of(tmp_path)
    assert (config.policy.path, config.lora.rank, type(config.trainer).__name__) == (
        "a/model",
        4,
        "TransformersTrainer",
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": model | {"trainer": "of_the_run.Trainer"}}))
    with pytest.raises(ConfigError, match="'Trainer' is not a known trainer"):
        config_of(tmp_path)
