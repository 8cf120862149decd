"""Upload of an exported policy to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from rlplug.errors import ConfigError, RunError


def refuse_links(folder: Path) -> None:
    """Refuse a folder that is a link or holds one: a copy or an upload would take whatever it leads to, such as a key.

    Raises:
        ConfigError: The message names the links.
    """
    if links := sorted(str(path) for path in [folder, *folder.rglob("*")] if path.is_symlink()):
        more = f" and {len(links) - 5} more" if len(links) > 5 else ""
        raise ConfigError(
            f"{folder} has links, which may lead to any file of yours: {', '.join(links[:5])}{more}. Put files in "
            "their place."
        )


def files_of(folder: Path) -> list[tuple[str, int]]:
    """Return names and sizes in bytes of the files that an upload sends: all in the folder but hidden ones.

    Raises:
        ConfigError: The folder has links.
    """
    refuse_links(folder)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    named = [(path.relative_to(folder), path.stat().st_size) for path in found]
    return [(str(name), size) for name, size in named if not any(part.startswith(".") for part in name.parts)]


def push(folder: Path, repo: str, is_private: bool) -> str:
    """Upload a folder as a model repository, which is made if it does not exist, and return its address.

    The access token is the one of ``hf auth login`` or of the variable HF_TOKEN, as huggingface_hub finds it; rlplug
    neither reads nor writes it. Nothing in the folder changes.

    Args:
        folder: The folder.
        repo: Name on the Hub, such as ``me/my-policy``.
        is_private: Whether a new repository is private; one that exists stays as it is.

    Raises:
        ConfigError: The name is none, there is no token, or the folder has links.
        RunError: The Hub refuses, or cannot be reached.
    """
    api, names = HfApi(), [name for name, _ in files_of(folder)]
    try:
        address = api.create_repo(repo, repo_type="model", private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            allow_patterns=names,
            commit_message="Upload a policy with rlplug",
        )
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repo}: {error}") from error
    except (LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(f"--push-to-hub {repo}: {_first_line(error)} Log in with: hf auth login") from error
    except HfHubHTTPError as error:
        raise RunError(f"--push-to-hub {repo}: the Hub at {api.endpoint} refuses: {_first_line(error)}") from error
    except Exception as error:  # of its HTTP library, which changes between versions
        raise RunError(f"--push-to-hub {repo}: the upload to {api.endpoint} failed: {_first_line(error)}") from error
    return str(address)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
