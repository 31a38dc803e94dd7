"""A headless Chromium for tests of pages, controlled over the pipe of its debugging protocol."""

import contextlib
import json
import os
import shutil
import signal
import subprocess

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """A page that is open in the browser.

    `errors` has what the console showed as an error so far: exceptions, and blocked content.
    """

    def __init__(self, call, errors):
        self._call = call
        self.errors = errors

    def run(self, script):
        """The JSON value of a JavaScript expression; promises are awaited."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def move_mouse(self, x, y, kind="mouseMoved", **options):
        """Moves the mouse to a point of the window."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def drag(self, start, end):
        """Drags the mouse with its left button from a point to another."""
        button = {"button": "left", "clickCount": 1}
        self.move_mouse(*start)
        self.move_mouse(*start, "mousePressed", **button)
        for share in (0.3, 0.6, 1.0):
            at = [a + share * (b - a) for a, b in zip(start, end)]
            self.move_mouse(*at, button="left", buttons=1)
        self.move_mouse(*end, "mouseReleased", **button)

    def resize(self, width, height=900):
        """Sets the size of the window in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)


@contextlib.contextmanager
def open_page(place, profile):
    """Opens a file by its file:// address, or an address, and waits until it is loaded."""
    address = place if isinstance(place, str) else place.as_uri()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "install Chromium"
    reads, commands = os.pipe()
    answers, writes = os.pipe()

    def connect():  # the browser reads from descriptor 3 and writes to 4
        saved = os.dup(reads), os.dup(writes)
        os.dup2(saved[0], 3)
        os.dup2(saved[1], 4)

    process = subprocess.Popen(
        [browser, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(reads)
    os.close(writes)
    buffer, number, loaded, errors = b"", 0, False, []

    def receive():
        nonlocal buffer, loaded
        while b"\0" not in buffer:
            data = os.read(answers, 1 << 20)
            assert data, "the browser ended"
            buffer += data
        message, _, buffer = buffer.partition(b"\0")
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        loaded |= method == "Page.loadEventFired"
        if method == "Runtime.exceptionThrown":
            errors.append(params["exceptionDetails"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            errors.append(params["entry"])
        return message

    def call(method, session=None, **params):
        nonlocal number
        number += 1
        request = {"id": number, "method": method, "params": params}
        if session:
            request["sessionId"] = session
        os.write(commands, json.dumps(request).encode() + b"\0")
        while (message := receive()).get("id") != number:
            pass
        assert "error" not in message, message["error"]
        return message["result"]

    # A browser that hangs ends the test instead of blocking it.
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(120)
    try:
        target = call("Target.createTarget", url="about:blank")["targetId"]
        session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            call(f"{domain}.enable", session)
        loaded = False
        call("Page.navigate", session, url=address)
        while not loaded:
            receive()
        yield Page(lambda method, **params: call(method, session, **params), errors)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        os.close(commands)
        os.close(answers)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
