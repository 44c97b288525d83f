"use strict";
/* Puts the parts together: frames come in, and figures, charts, texts and the replay show them. */

(() => {
  const $ = (id) => document.getElementById(id);
  const NOW_SECONDS = 5, LEAST_SECONDS = 20;
  const MOST_ROUNDS = 500, SURPLUS = 100;
  const NO_TEXT = { rounds: [], isOpen: false, written: () => [] };
  const isStill = matchMedia("(prefers-reduced-motion: reduce)");
  const charts = [
    { id: "throughput", title: "Throughput", says: "tokens a second, all texts together", digits: 0, least: 10, idle: 0, figure: "tokensPerSecond", smooth: 0 },
    { id: "alpha", title: "α", says: "accepted share of the evaluated draft tokens", digits: 2, least: 1, idle: null, figure: "alpha", smooth: NOW_SECONDS },
    { id: "tau", title: "τ", says: "tokens per target pass with a draft", digits: 2, least: 2, idle: null, figure: "tau", smooth: NOW_SECONDS },
    { id: "gamma", title: "γ", says: "draft tokens requested per text and pass", digits: 1, least: 2, idle: null, figure: "gamma", smooth: 0 },
  ].map((about) => new Chart($("charts"), about));

  let about = null, series = null, latest = null, clock = 0;
  let followed = null, wanted = null;
  const writings = new Map();
  const player = new Player();

  const stream = new Stream("live/events", { onFrame: (frame) => show(frame), onState: (name, more) => tellLink(name, more) });
  new Trial(stream, () => about?.show_text ?? true, (prompt) => { wanted = prompt; });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = $("key").value;
    $("key").value = "";
    $("key-form").hidden = true;
    stream.haveKey(key);
  });

  function tellLink(name, more) {
    const words = { live: "Live", lost: "Connection lost, trying again …", key: "Waiting for the key", full: `Not shown: ${more}` };
    $("link").textContent = words[name];
    $("link").className = `link is-${name === "live" ? "live" : "lost"}`;
    if (name === "key") {
      $("key-form").hidden = false;
      $("key-said").textContent = more ? "That key was not accepted." : "";
      $("key").focus();
    }
  }

  function show(frame) {
    if (frame.about) begin(frame.about);
    clock = frame.time - performance.now() / 1000;
    series.add(frame.samples);
    if (frame.latest) latest = frame.latest;
    showTexts(frame);
    showRounds(frame);
    if (latest) showFigures();
    drawCharts();
    document.documentElement.dataset.ready = "true";
  }

  /** A connection begins: perhaps to a server that was started anew, whose texts count from 0 again. */
  function begin(found) {
    about = found;
    series = new Series(about.columns, about.seconds);
    for (const writing of writings.values()) forget(writing);
    followed = null;
    player.show(NO_TEXT);
    const facts = [["Target", about.target, true], ["Draft", about.draft, true], ["Method", about.method], ["γ", about.speculative_tokens], ["Device", about.device]];
    $("about").replaceChildren(
      ...facts.filter(([, value]) => value !== null && value !== "").map(([name, value, isModel]) => {
        const fact = document.createElement("span"), bold = document.createElement("b");
        bold.textContent = `${name} `;
        fact.append(bold, isModel ? value.name : String(value));
        if (isModel) {
          const kind = document.createElement("i");
          kind.textContent = ` ${value.quantization ?? value.dtype}`;
          fact.append(kind);
        }
        return fact;
      }),
    );
  }

  function showTexts(frame) {
    for (const state of frame.texts) {
      const known = writings.get(state.id);
      if (known) known.update(state);
      else {
        const writing = new Writing(state, (one) => follow(one));
        writings.set(state.id, writing);
        $("texts").prepend(writing.box);
        if (wanted !== null && writing.prompt?.endsWith(wanted.slice(-100))) {
          wanted = null;
          follow(writing);
        }
      }
    }
    const shown = new Set(frame.shown);
    for (const [id, writing] of writings) {
      if (shown.has(id)) continue;
      writing.isOpen = false;
      if (writing !== followed) forget(writing);
    }
    if (!followed || (!followed.isOpen && !player.replay.isPlaying && wanted === null)) {
      const next = [...writings.values()].findLast((writing) => writing.isOpen);
      if (next) follow(next);
    }
    const open = [...writings.values()].filter((writing) => writing.isOpen).length;
    const others = Math.max(0, (latest?.num_running ?? 0) - open);
    $("others").hidden = writings.size > 0 && !others;
    $("others").textContent = others ? `${others} more are being written.` : "Nothing is being written.";
  }

  function forget(writing) {
    writing.box.remove();
    writings.delete(writing.id);
    for (const { step } of writing.rounds) delete Data.steps[step];
  }

  function follow(writing) {
    followed?.button.setAttribute("aria-pressed", "false");
    followed = writing;
    writing.button.setAttribute("aria-pressed", "true");
    player.show(writing);
    tellReplayed();
    if (writing.rounds.length && !isStill.matches) player.replay.play();
  }

  function tellReplayed() {
    const counted = `${followed.rounds.length} of the rounds of text ${followed.id}`;
    $("replayed").textContent = about.show_text
      ? `Here: ${counted}. Only some are recorded with their probabilities, so that the engine is not held up.`
      : "This server does not show texts, so there is no replay.";
  }

  function showRounds(frame) {
    Object.assign(Data.steps, frame.steps);
    const hadNone = !followed?.rounds.length;
    for (const round of frame.rounds) {
      const writing = writings.get(round.text);
      if (!writing) continue;
      writing.rounds.push(round);
      if (writing.rounds.length <= MOST_ROUNDS) continue;
      for (const { step } of writing.rounds.splice(0, SURPLUS)) delete Data.steps[step];
      if (writing === followed) player.shift(SURPLUS);
    }
    if (!frame.rounds.some((round) => round.text === followed?.id)) return;
    player.grow();
    tellReplayed();
    if (!hadNone) return;
    player.choose(0);
    if (!isStill.matches) player.replay.play();
  }

  function showFigures() {
    const last = series.last, start = series.before(last, NOW_SECONDS);
    const isRunning = latest.num_running > 0 || now() - series.time(last) < 1.5;
    const at = (figure) => (isRunning ? series[figure](start, last) : null);
    const whole = (part, all) => Data.ratio(latest[part], latest[all]);
    const all = latest.num_spec_steps ? (1 + latest.num_accepted_tokens / latest.num_spec_steps).toFixed(2) : "–";
    const used = latest.cache_used - latest.cache_retained;
    const figures = [
      ["tokens a second", Chart.number(isRunning ? at("tokensPerSecond") : 0, 0)],
      ["α, accepted / evaluated", Chart.number(at("alpha"), 2), `all: ${whole("num_accepted_tokens", "num_evaluated_tokens")}`],
      ["τ, tokens per pass with a draft", Chart.number(at("tau"), 2), `all: ${all}`],
      ["tokens per pass, with or without drafts", Chart.number(at("tokensPerPass"), 2), `all: ${whole("num_emitted_tokens", "num_steps")}`],
      ["γ, requested draft tokens", Chart.number(at("gamma"), 1)],
      ["running, waiting", `${latest.num_running}, ${latest.num_waiting}`],
      ["cache in use", Data.percent(used, latest.cache_total), `${Data.percent(latest.cache_retained, latest.cache_total)} kept`],
    ];
    $("figures").replaceChildren(...figures.map(RoundView.figure));
    tellState(isRunning, start, last);
    const counts = { ...latest, asked: undefined, resting: undefined, fallbacks: undefined };
    for (const [drafter, times] of Object.entries(latest.asked)) counts[`asked: ${drafter}`] = times;
    for (const [what, times] of Object.entries(latest.fallbacks)) counts[`switched off: ${what}`] = times;
    $("counts").replaceChildren(
      ...Object.entries(counts).filter(([, value]) => value !== undefined).map(([name, value]) => {
        const row = RoundView.row([name, String(value)]);
        row.dataset.count = name;
        return row;
      }),
    );
  }

  /** Whether drafts are requested, and if not, why. */
  function tellState(isRunning, start, last) {
    const reasons = { memory_short: "cache memory is short", failed: "it failed, see the log", min_acceptance_rate: "too few of its draft tokens were accepted", max_draft_memory: "it used too much memory" };
    const rests = Object.entries(latest.resting).map(([drafter, why]) => `${drafter} is switched off: ${reasons[why] ?? why}`);
    let said = "Idle.";
    if (isRunning && series.grown("num_asked_steps", start, last) > 0) said = `Drafting with ${about.method}.`;
    else if (isRunning && series.grown("num_steps", start, last) > 0) said = "Resting: plain decoding, since drafts do not pay off now or are not wanted.";
    const words = [said, ...rests.map((one) => `${one}.`)].join(" ");
    const place = $("state");
    if (place.textContent !== words) place.textContent = words; // it is read out whenever it is set
  }

  function now() {
    return clock + performance.now() / 1000;
  }

  function drawCharts() {
    if (!series?.last) return;
    const seconds = Math.min(about.seconds, Math.max(LEAST_SECONDS, now() - series.time(series.samples[0])));
    for (const chart of charts) {
      const { figure, smooth } = chart.about;
      chart.draw(series.line((from, until) => series[figure](from, until), smooth), now(), seconds);
    }
  }

  document.addEventListener("visibilitychange", drawCharts);
  setInterval(() => {
    drawCharts();
    if (latest) showFigures();
  }, 1000);
  stream.run();
})();
