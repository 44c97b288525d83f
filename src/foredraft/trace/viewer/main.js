"use strict";
/* Puts the parts together: one text and one round are chosen, and every part shows them. */

(() => {
  const $ = (id) => document.getElementById(id);
  const isStill = matchMedia("(prefers-reduced-motion: reduce)");
  let text = Data.texts[0];
  let at = 0;

  const textView = new TextView((index) => choose(index));
  const timeline = new Timeline((index) => choose(index));
  const roundView = new RoundView();
  const replay = new Replay($("stage"), {
    onPhase: (name) => { $("phase").textContent = name; },
    onRound: (index) => show(index),
    onPlaying: (isPlaying) => {
      $("play").classList.toggle("playing", isPlaying);
      $("play").querySelector("span").textContent = isPlaying ? "Pause" : "Play";
      roundView.select(at, isPlaying);
    },
    isStill: () => isStill.matches,
  });

  /** What a round looks like everywhere but in the replay. */
  function show(index) {
    at = index;
    $("seek").value = index + 1;
    $("seek").setAttribute("aria-valuetext", `Round ${index + 1} of ${text.rounds.length}`);
    textView.select(index);
    timeline.select(index);
    roundView.select(index, replay.isPlaying);
  }

  function choose(index) {
    index = Math.max(0, Math.min(text.rounds.length - 1, index));
    replay.select(index);
    show(index);
  }

  function open(chosen) {
    text = chosen;
    $("seek").max = Math.max(1, text.rounds.length);
    $("text-error").hidden = !text.error;
    $("text-error").textContent = text.error ? `This text failed: ${text.error}` : "";
    tellCounts();
    textView.show(text);
    timeline.show(text);
    roundView.show(text);
    replay.show(text);
    choose(Math.max(0, text.rounds.findIndex((round) => Data.rejectedOf(round) && Data.acceptedOf(round).length)));
  }

  function tellCounts() {
    const counts = Data.countsOf(text.rounds);
    const time = text.rounds.reduce((sum, { step }) => sum + Timeline.end(Data.steps[step]) - Data.steps[step].start, 0);
    const accepted = counts.num_accepted_tokens;
    const figures = [
      ["tokens", counts.num_emitted_tokens.toLocaleString("en")],
      ["rounds", counts.num_steps.toLocaleString("en")],
      ["tokens per round", Data.ratio(counts.num_emitted_tokens, counts.num_steps)],
      ["draft tokens accepted", Data.percent(accepted, counts.num_draft_tokens), `${accepted.toLocaleString("en")} of ${counts.num_draft_tokens.toLocaleString("en")}`],
      ["α, accepted of those looked at", Data.ratio(accepted, counts.num_evaluated_tokens)],
      ["τ, mean acceptance length", counts.num_spec_steps ? (1 + accepted / counts.num_spec_steps).toFixed(2) : "–"],
      ["in these rounds", Data.seconds(time)],
    ];
    $("figures").replaceChildren(
      ...figures.map(([name, value, more]) => {
        const pair = document.createElement("div");
        const term = document.createElement("dt"), number = document.createElement("dd");
        term.textContent = name;
        number.textContent = value;
        if (more) {
          const small = document.createElement("small");
          small.textContent = ` ${more}`;
          number.append(small);
        }
        pair.append(term, number);
        return pair;
      }),
    );
    $("counts").replaceChildren(
      ...Object.entries(counts).map(([name, value]) => {
        const row = RoundView.row([name, String(value), String(Data.allCounts[name])]);
        row.dataset.count = name;
        return row;
      }),
    );
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const tag = event.target.tagName;
    if (event.key === "Escape") { $("tip").hidden = true; return; }
    if (["SELECT", "INPUT", "TEXTAREA"].includes(tag)) return;
    if (event.key === " " && ["BUTTON", "SUMMARY"].includes(tag)) return;
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === " ") replay.toggle();
    else if (way && event.shiftKey) { replay.pause(); choose(at + way); }
    else if (way) replay.step(way);
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(text.rounds.length - 1);
    else return;
    event.preventDefault();
  }

  document.addEventListener("keydown", onKey);
  $("play").addEventListener("click", () => replay.toggle());
  $("step-on").addEventListener("click", () => replay.step(1));
  $("step-back").addEventListener("click", () => replay.step(-1));
  $("seek").addEventListener("input", () => choose($("seek").value - 1));
  $("speed").addEventListener("change", () => { replay.speed = Number($("speed").value); });
  $("text-choice").append(
    ...Data.texts.map((one, index) => {
      const start = (one.prompt ?? `${one.numPromptIds} prompt tokens`).replace(/\s+/g, " ").slice(-60);
      return new Option(`${index + 1}: ${start}${one.child ? ` (text ${one.child + 1})` : ""}`, index);
    }),
  );
  $("text-choice").addEventListener("change", () => open(Data.texts[$("text-choice").value]));

  open(text);
  // two frames: the first is laid out and painted by the time the second is asked for
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = "true";
    performance.mark("ready");
  }));
})();
