"""Renders chat templates in a process with limits: python -m semrl_jax.support.chat_worker TIME_S.

A chat template is a program of a model's author. It may run for ever, or make a text of any size in
one step. Every line of stdin is a request, and every reply is a line of stdout, see
`data.chat_templates`. The process ends with its parent, and by SIGPROF at its limit of time.
"""

import json
import os
import resource
import signal
import sys

MAX_CHARS = 4_000_000  # of a rendered conversation
TIME_S, EACH_S = 5.0, 0.01  # CPU time of a request, and more for each conversation
MEMORY_BYTES = 2**30  # beyond what the process has after its start


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    time_s = float(sys.argv[1])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else is written between the replies
    if sys.platform == "linux":  # macOS refuses to set such a limit
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            rendered, conversations = [], request["conversations"]
            signal.setitimer(signal.ITIMER_PROF, time_s + EACH_S * len(conversations))
            for messages, add_generation_prompt in conversations:
                texts, marks = render_jinja_template(
                    [messages],
                    tools=request["tools"],
                    chat_template=request["template"],
                    return_assistant_tokens_mask=request["with_marks"],
                    add_generation_prompt=add_generation_prompt,
                    **request["special_tokens"],
                )
                if len(texts[0]) > MAX_CHARS:
                    raise ValueError(f"it makes a text of more than {MAX_CHARS} characters")
                rendered.append((texts[0], marks[0] if marks else []))
            reply = {"rendered": rendered}
        except MemoryError:
            reply = {"error": f"it takes more than {MEMORY_BYTES // 2**30} GiB of memory"}
        except Exception as error:  # the template may fail in any way
            reply = {"error": f"{error}"[:1000] or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
