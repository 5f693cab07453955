//! A real browser without a display, driven by the DevTools protocol over a pipe.

use std::{path::Path, process::Stdio, time::Duration};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{Instant, timeout},
};

/// How long the browser, or a page, may take for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a page is shown on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) is_dark: bool,
    pub(crate) is_phone: bool,
}

pub(crate) const DESK: Screen =
    Screen { width: 1_360, height: 900, is_dark: false, is_phone: false };
pub(crate) const PHONE: Screen = Screen { width: 390, height: 844, is_dark: true, is_phone: true };

/// A browser with one page; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Browser {
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    calls: u64,
    session: Option<String>,
    /// What happened beside the answers.
    events: Vec<Value>,
    _process: Child,
    _profile: TempDir,
}

impl Browser {
    pub(crate) async fn open(screen: Screen) -> Self {
        let profile = tempfile::tempdir().unwrap();
        let root = env!("CARGO_MANIFEST_DIR");
        // It reads from descriptor 3 and writes to 4. As root it has no sandbox of its own.
        let script = format!(
            ". '{root}/scripts/locate.sh' && exec \"$(find_chromium)\" \"$@\" 3<&0 4>&1 \
             </dev/null >/dev/null 2>&1"
        );
        let profile_flag = format!("--user-data-dir={}", profile.path().display());
        let mut process = Command::new("bash")
            .args(["-c", &script, "bash", "--headless", "--no-sandbox", "--disable-gpu"])
            .args(["--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run"])
            .args([&profile_flag, "about:blank"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let to = process.stdin.take().unwrap();
        let from = BufReader::new(process.stdout.take().unwrap());
        let mut browser = Self {
            to,
            from,
            calls: 0,
            session: None,
            events: Vec::new(),
            _process: process,
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"})).await;
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", target).await;
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({})).await;
        }
        browser.turn(screen).await;
        browser
    }

    /// Shows the page on another screen.
    pub(crate) async fn turn(&mut self, screen: Screen) {
        let Screen { width, height, is_dark, is_phone } = screen;
        let scale = if is_phone { 1.5 } else { 1.0 };
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone});
        self.call("Emulation.setDeviceMetricsOverride", metrics).await;
        let scheme = if is_dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features).await;
    }

    pub(crate) async fn go(&mut self, url: &str) {
        let navigated = self.call("Page.navigate", json!({"url": url})).await;
        assert_eq!(navigated.get("errorText"), None, "{url}");
        self.until("the page is there", "document.querySelector('.banner') !== null").await;
    }

    /// One call of the protocol.
    pub(crate) async fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).await.unwrap();
        loop {
            let mut answer = Vec::new();
            let read = timeout(PATIENCE, self.from.read_until(0, &mut answer)).await;
            assert_ne!(read.expect("the browser answers").unwrap(), 0, "the browser has ended");
            answer.pop();
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            if answer["id"] == self.calls {
                assert_eq!(answer.get("error"), None, "{method}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// What an expression is in the page; a promise is waited for.
    pub(crate) async fn js(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let result = self.call("Runtime.evaluate", params).await;
        assert_eq!(result.get("exceptionDetails"), None, "{expression}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub(crate) async fn until(&mut self, what: &str, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.js(&format!("Boolean({expression})")).await != true {
            if Instant::now() > deadline {
                let text = self.js("document.body.innerText").await;
                panic!("not within {PATIENCE:?}: {what}\n{}", text.as_str().unwrap_or_default());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the page shows this text.
    pub(crate) async fn shows(&mut self, text: &str) {
        let text = json!(text);
        self.until(
            &format!("the page shows {text}"),
            &format!("document.body.innerText.includes({text})"),
        )
        .await;
    }

    /// Presses the button that has this text, with the keyboard.
    pub(crate) async fn press(&mut self, button: &str) {
        let text = json!(button);
        let find = format!(
            "[...document.querySelectorAll('dialog[open] button, body:not(:has(dialog[open])) button')]\
             .find((b) => b.textContent === {text} && b.offsetParent && !b.disabled)"
        );
        self.until(&format!("there is a button {text}"), &find).await;
        self.js(&format!("({find}).focus()")).await;
        self.key("Enter", "\r").await;
    }

    /// Types into what has the focus.
    pub(crate) async fn types(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text})).await;
    }

    pub(crate) async fn key(&mut self, key: &str, text: &str) {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            other => panic!("no code for the key {other}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let params = json!({"type": kind, "key": key, "code": key, "text": text,
                "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", params).await;
        }
    }

    /// Writes what is on the screen to a file.
    pub(crate) async fn picture(&mut self, path: &Path) {
        let params = json!({"format": "png", "optimizeForSpeed": false});
        let picture = self.call("Page.captureScreenshot", params).await;
        let bytes = base64(picture["data"].as_str().unwrap());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    /// What the page, or the browser on its behalf, has complained of.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let is_complaint = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown" | "Log.entryAdded") => true,
            Some("Runtime.consoleAPICalled") => {
                ["error", "warning", "assert"].contains(&event["params"]["type"].as_str().unwrap())
            }
            _ => false,
        };
        self.events.iter().filter(is_complaint).map(ToString::to_string).collect()
    }

    /// Begins to write down what runs in the page.
    pub(crate) async fn trace(&mut self) {
        let categories =
            json!({"includedCategories": ["devtools.timeline"], "excludedCategories": ["*"]});
        let params = json!({"transferMode": "ReportEvents", "traceConfig": categories});
        self.call("Tracing.start", params).await;
    }

    /// How long each piece of script has taken since then, in milliseconds of a processor; the longest
    /// is the last.
    pub(crate) async fn scripts(&mut self) -> Vec<f64> {
        self.call("Tracing.end", json!({})).await;
        let deadline = Instant::now() + PATIENCE;
        while !self.events.iter().any(|event| event["method"] == "Tracing.tracingComplete") {
            assert!(Instant::now() < deadline, "the trace does not end");
            self.js("true").await;
        }
        let collected = |event: &&Value| event["method"] == "Tracing.dataCollected";
        let collected = self.events.iter().filter(collected);
        let pieces = collected.flat_map(|event| event["params"]["value"].as_array().unwrap());
        let is_script = |name: &Value| {
            ["TimerFire", "FunctionCall", "RunMicrotasks"].iter().any(|script| name == script)
        };
        let scripts = pieces.filter(|piece| is_script(&piece["name"]));
        let mut took: Vec<f64> =
            scripts.filter_map(|script| script["tdur"].as_f64()).map(|us| us / 1_000.0).collect();
        took.sort_by(f64::total_cmp);
        took
    }

    /// Everything that was asked for, by whole address.
    pub(crate) fn asked(&self) -> Vec<&str> {
        let asked =
            self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        asked.map(|event| event["params"]["request"]["url"].as_str().unwrap()).collect()
    }

    /// What axe-core finds wrong for those who can't see or use a mouse.
    pub(crate) async fn barriers(&mut self) -> Vec<String> {
        let axe =
            concat!(env!("CARGO_MANIFEST_DIR"), "/target/tools/node_modules/axe-core/axe.min.js");
        let axe = std::fs::read_to_string(axe).expect("make services has put it there");
        self.js(&format!("{axe}; true")).await;
        let found = self
            .js("axe.run().then(({ violations }) => violations.flatMap(({ id, nodes }) => \
                 nodes.map(({ html, failureSummary }) => `${id}: ${html} ${failureSummary}`)))")
            .await;
        found.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
    }
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |b: u8| match b {
        b'A'..=b'Z' => b - b'A',
        b'a'..=b'z' => b - b'a' + 26,
        b'0'..=b'9' => b - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = four.iter().fold(0_u32, |bits, b| bits << 6 | u32::from(digit(*b)));
        let bits = bits << (6 * (4 - four.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..four.len()]);
    }
    bytes
}
