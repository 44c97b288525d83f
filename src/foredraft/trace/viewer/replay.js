"use strict";
/* The replay: three floors, draft above target above text, and the tokens of a round on their way down.

   A moment is a round and a number u from 0 to 1. `Moment.items` says what is to be seen then, as plain objects;
   `Stage` puts such objects on the screen with three.js and knows nothing of rounds; `Replay` moves u. */

const FLOORS = { draft: 3.0, target: 0, text: -2.75 };
const PHASES = [["draft", 0.36], ["verify", 0.82], ["accept", 1]]; // a phase and the u at which it is done
const ROUND_MS = 2800;
const LANE = 1.15; // between a branch and the next one behind it

const between = (u, from, until) => Math.max(0, Math.min(1, (u - from) / (until - from)));
const smooth = (t) => t * t * (3 - 2 * t);
const pop = (t) => (t <= 0 ? 0 : t >= 1 ? 1 : 1 + 2.2 * (t - 1) ** 3 + 1.2 * (t - 1) ** 2);
const mix = (a, b, t) => a + (b - a) * t;

const Moment = {
  /** What is to be seen of a round at u. written: the tokens before it, [kind, token], last ones last. depth: how many
      of them fit. -> items {slot, y, z, size, kind, opacity, name, note, below, behind}; behind: in a tree the item of the token
      before it */
  items(round, before, written, u, depth) {
    return [...Moment.past(before, written, u, depth), ...Moment.drafted(round, u), ...Moment.own(round, u)];
  },

  past(before, written, u, depth) {
    const shift = smooth(between(u, 0, 0.08));
    const newest = mix((before ? Data.keptOf(before).length : 0) - 1, -1, shift);
    return written.slice(-(depth + 1) - (before ? Data.keptOf(before).length : 0)).reverse().map(([kind, token], back) => {
      const slot = newest - back;
      const opacity = between(slot, -depth - 1, -depth);
      return { slot, y: FLOORS.text + 0.42, z: 0, size: 0.8, kind, opacity, name: Data.nameOf(token), note: "", below: true };
    });
  },

  drafted(round, u) {
    const depths = Data.depthsOf(round), lanes = Data.lanesOf(round), longest = Data.longestOf(round);
    const items = [];
    round.draft.forEach((token, place) => {
      const slot = depths[place], item = Moment.draftItem(token, u, slot, longest);
      item.z -= LANE * lanes[place];
      if (Data.isTree(round)) item.behind = items[Data.parentOf(round, place)];
      items.push(item);
    });
    return items;
  },

  /** slot: its depth in a draft of so many tokens, the longest branch of a tree. */
  draftItem(token, u, slot, longest) {
    const born = 0.08 + (0.2 * slot) / longest;
    const judged = u >= 0.54 + (0.16 * (slot + 1)) / (longest + 1);
    const kind = judged ? token.verdict : "draft";
    const item = { slot, z: 0, kind, opacity: 1, name: Data.nameOf(token), below: false };
    const fall = smooth(between(u, 0.38, 0.52));
    item.size = pop(between(u, born, born + 0.08));
    item.y = mix(FLOORS.draft + 0.46 * item.size, FLOORS.target + 0.46, fall);
    item.note = judged ? `${{ accepted: "✓ ", rejected: "✕ " }[kind] ?? ""}p ${Data.probability(token.p)}` : `q ${Data.probability(token.q)}`;
    if (kind === "accepted") Moment.settle(item, u);
    if (kind === "rejected") {
      const gone = smooth(between(u, 0.84, 0.97));
      Object.assign(item, { y: item.y - 0.5 * gone, z: 1.6 * gone, opacity: 1 - gone, size: mix(1, 0.6, gone) });
    }
    if (kind === "unused") {
      Object.assign(item, { note: "", opacity: u > 0.84 ? 1 - smooth(between(u, 0.84, 0.94)) : 0.55, size: 0.75 });
    }
    return item;
  },

  own(round, u) {
    if (!round.own) return [];
    const { origin } = round.own;
    const size = pop(between(u, 0.72, 0.8));
    const item = { slot: Data.acceptedOf(round).length, z: 0, size, kind: origin, opacity: 1, name: Data.nameOf(round.own), below: true };
    item.y = FLOORS.target - 0.62 * size;
    item.note = origin === "plain" ? `p ${Data.probability(round.own.p)}` : `${origin}`;
    return [Moment.settle(item, u)];
  },

  settle(item, u) {
    const down = smooth(between(u, 0.84, 0.98));
    item.y = mix(item.y, FLOORS.text + 0.42, down);
    item.size *= mix(1, 0.8, down);
    if (down > 0.5) Object.assign(item, { note: "", below: true });
    return item;
  },

  /** Where the target's eye is: a slot, or null while it is shut. */
  scan(round, u) {
    const stop = Math.min(Data.acceptedOf(round).length, Data.longestOf(round) - 1);
    return u > 0.53 && u < 0.74 && round.draft.length ? mix(-0.5, stop + 0.5, between(u, 0.54, 0.7)) : null;
  },

  phase(u) {
    return PHASES.find(([, end]) => u <= end + 1e-6)[0];
  },
};

class Stage {
  /** Throws where there is no WebGL. */
  constructor(box) {
    this.box = box;
    this.renderer = new THREE.WebGLRenderer({ antialias: true, alpha: true });
    this.renderer.setPixelRatio(Math.min(window.devicePixelRatio || 1, 2));
    box.append(this.renderer.domElement);
    this.camera = new THREE.PerspectiveCamera(30, 1, 0.1, 200);
    this.turn = { around: -0.3, above: 0.27 };
    this.shapes = {
      ball: new THREE.SphereGeometry(0.33, 28, 18), box: new THREE.BoxGeometry(0.5, 0.5, 0.5),
      spike: new THREE.TetrahedronGeometry(0.46), gem: new THREE.OctahedronGeometry(0.42),
    };
    this.pool = [];
    box.addEventListener("pointerdown", (event) => this.startTurn(event));
  }

  static KINDS = {
    draft: ["ball", "--slab-draft"], accepted: ["ball", "--accepted-line"], rejected: ["spike", "--rejected-line"],
    unused: ["ball", "--plain-line"], recovered: ["box", "--recovered-line"], bonus: ["gem", "--bonus-line"],
    plain: ["box", "--plain-line"],
  };

  /** A new scene with so many slots, and lanes for the branches of trees. */
  build(slots, lanes) {
    this.pool.forEach(({ label }) => label.remove());
    this.pool = [];
    this.slots = slots;
    this.lanes = lanes;
    this.gap = slots > 6 ? 1.4 : 1.75;
    this.scene = new THREE.Scene();
    this.scene.add(new THREE.HemisphereLight(0xffffff, 0x8890a0, 0.85));
    const sun = new THREE.DirectionalLight(0xffffff, 0.5);
    sun.position.set(3, 8, 6);
    this.scene.add(sun);
    const style = getComputedStyle(document.documentElement);
    this.colour = (name) => new THREE.Color(style.getPropertyValue(name).trim());
    this.addSlab(FLOORS.draft, "--slab-draft");
    this.addSlab(FLOORS.target, "--slab-target");
    const rail = new THREE.Mesh(new THREE.BoxGeometry(200, 0.03, 0.03), new THREE.MeshBasicMaterial({ color: this.colour("--plain-line"), transparent: true, opacity: 0.5 }));
    rail.position.y = FLOORS.text;
    this.eye = new THREE.Mesh(new THREE.BoxGeometry(0.05, 1.5, 1.9), new THREE.MeshBasicMaterial({ color: this.colour("--slab-target"), transparent: true, opacity: 0.45 }));
    this.branches = new THREE.LineSegments(new THREE.BufferGeometry(), new THREE.LineBasicMaterial({ color: this.colour("--plain-line") }));
    this.branches.frustumCulled = false;
    this.scene.add(rail, this.eye, this.branches);
    for (const label of this.box.querySelectorAll(".slab")) label.remove();
    this.signs = [["draft", FLOORS.draft], ["target", FLOORS.target], ["text", FLOORS.text]].map(([name, y]) => {
      const label = this.newLabel("label slab");
      label.textContent = name;
      return { label, at: new THREE.Vector3(name === "text" ? this.x(this.slots - 0.5) : this.x(-0.65), y, 0) };
    });
    this.resize();
  }

  addSlab(y, colour) {
    const wide = this.gap * (this.slots + 0.1);
    const behind = LANE * (this.lanes - 1);
    const shape = new THREE.BoxGeometry(wide, 0.1, 2.1 + behind);
    const slab = new THREE.Mesh(shape, new THREE.MeshLambertMaterial({ color: this.colour(colour), transparent: true, opacity: 0.3, depthWrite: false }));
    const edges = new THREE.LineSegments(new THREE.EdgesGeometry(shape), new THREE.LineBasicMaterial({ color: this.colour(colour) }));
    slab.position.y = edges.position.y = y;
    slab.position.x = edges.position.x = this.x((this.slots - 1) / 2);
    slab.position.z = edges.position.z = -behind / 2;
    this.scene.add(slab, edges);
    const ring = new THREE.RingGeometry(0.4, 0.44, 40);
    const paint = new THREE.MeshBasicMaterial({ color: this.colour(colour), transparent: true, opacity: 0.75, side: THREE.DoubleSide });
    for (let i = 0; i < this.slots; i++) {
      const mark = new THREE.Mesh(ring, paint);
      mark.rotation.x = -Math.PI / 2;
      mark.position.set(this.x(i), y + 0.06, 0);
      this.scene.add(mark);
    }
  }

  x(slot) {
    return (slot - (this.slots - 1) / 2) * this.gap;
  }

  newLabel(name) {
    const label = document.createElement("div");
    label.className = name;
    label.setAttribute("aria-hidden", "true");
    this.box.append(label);
    return label;
  }

  /** Chooses how many tokens of the past fit beside the slots, and how far away the camera stands. */
  resize() {
    this.width = this.box.clientWidth;
    this.height = this.box.clientHeight;
    if (!this.width || !this.slots) return;
    this.renderer.setSize(this.width, this.height, false);
    const high = 8.9, room = (high * this.width) / this.height / this.gap - this.slots - 0.9;
    this.depth = Math.max(0, Math.min(6, Math.floor(room)));
    const wide = (this.slots + this.depth + 0.9) * this.gap;
    const aspect = this.width / this.height;
    this.camera.aspect = aspect;
    this.distance = Math.max(high, wide / aspect) / 2 / Math.tan((this.camera.fov * Math.PI) / 360);
    this.middle = this.x((this.slots - 1 - this.depth) / 2);
    this.pixels = (this.gap * this.width) / (Math.max(high * aspect, wide));
    this.aim();
  }

  aim() {
    const { around, above } = this.turn;
    const flat = this.distance * Math.cos(above);
    this.camera.position.set(this.middle + flat * Math.sin(around), 0.5 + this.distance * Math.sin(above), flat * Math.cos(around));
    this.camera.lookAt(this.middle, 0.5, 0);
    this.camera.updateProjectionMatrix();
    this.camera.updateMatrixWorld();
  }

  startTurn(event) {
    const from = { x: event.clientX, y: event.clientY, ...this.turn };
    const move = (to) => {
      this.turn.around = Math.max(-1.1, Math.min(1.1, from.around - (to.clientX - from.x) / 260));
      if (to.pointerType === "mouse") this.turn.above = Math.max(-0.25, Math.min(0.9, from.above + (to.clientY - from.y) / 260));
      this.aim();
      this.onTurn();
    };
    const stop = () => {
      for (const name of ["pointerup", "pointercancel"]) window.removeEventListener(name, stop);
      window.removeEventListener("pointermove", move);
    };
    window.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, stop);
  }

  draw(items, eyeSlot) {
    this.eye.visible = eyeSlot !== null;
    if (eyeSlot !== null) this.eye.position.set(this.x(eyeSlot), FLOORS.target + 0.75, 0);
    while (this.pool.length < items.length) this.pool.push(this.newParticle());
    this.pool.forEach((particle, i) => this.place(particle, items[i]));
    for (const { label, at } of this.signs) this.pin(label, at, 0, "left of");
    this.join(items.filter((item) => item.behind));
    this.renderer.render(this.scene, this.camera);
  }

  /** Lines from tokens of a tree to those before them. */
  join(items) {
    const seen = items.filter(({ behind, ...item }) => Math.min(item.size, behind.size, item.opacity, behind.opacity) > 0.01);
    const ends = seen.flatMap((item) => [item.behind, item].flatMap(({ slot, y, z }) => [this.x(slot), y, z]));
    this.branches.geometry.setAttribute("position", new THREE.Float32BufferAttribute(ends, 3));
  }

  newParticle() {
    const mesh = new THREE.Mesh(this.shapes.ball, new THREE.MeshLambertMaterial({ transparent: true }));
    const label = this.newLabel("label");
    const name = document.createElement("b"), note = document.createElement("small");
    label.append(name, note);
    this.scene.add(mesh);
    return { mesh, label, name, note };
  }

  place({ mesh, label, name, note }, item) {
    const isSeen = item !== undefined && item.size > 0.01 && item.opacity > 0.01;
    mesh.visible = isSeen;
    label.style.display = isSeen ? "" : "none";
    if (!isSeen) return;
    const [shape, colour] = Stage.KINDS[item.kind];
    mesh.geometry = this.shapes[shape];
    mesh.material.color = this.colour(colour);
    mesh.material.opacity = item.opacity;
    mesh.position.set(this.x(item.slot), item.y, item.z);
    mesh.rotation.set(0.15, 0.5, 0);
    mesh.scale.setScalar(item.size);
    label.className = `label is-${item.kind}`;
    label.style.opacity = item.opacity * Math.min(1, item.size * 1.3);
    const most = Math.max(3, Math.floor(this.pixels / 8.2));
    name.textContent = this.pixels < 30 ? "" : item.name.length > most ? `${item.name.slice(0, most - 1)}…` : item.name;
    note.textContent = this.pixels < 58 ? item.note.match(/^[✓✕]/)?.[0] ?? "" : item.note;
    this.pin(label, mesh.position, (item.below ? 1 : -1) * 0.46 * item.size, item.below ? "below" : "above");
  }

  /** Holds a label at a place in space, moved up by `rise`. */
  pin(label, place, rise, side) {
    const at = place.clone();
    at.y -= rise;
    at.project(this.camera);
    const left = side === "left of" ? label.offsetWidth + 6 : 0;
    const x = Math.max(left, ((at.x + 1) / 2) * this.width), y = ((1 - at.y) / 2) * this.height;
    const shift = { above: "-50%, -100%", below: "-50%, 0", "left of": "-100%, -50%" }[side];
    label.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px) translate(${shift})`;
  }
}

class Replay {
  /** events: onPhase(name), onRound(index), onPlaying(is), isStill(): whether motion is not wanted. */
  constructor(box, events) {
    this.box = box;
    this.events = events;
    this.speed = 1;
    this.isPlaying = false;
    this.index = 0;
    this.u = 0.82;
    this.until = null; // where a step ends
    this.rounds = [];
    try {
      this.stage = new Stage(box);
      this.stage.onTurn = () => this.draw();
    } catch {
      const note = document.createElement("p");
      note.className = "fallback";
      note.textContent = "This browser draws no WebGL here: the replay is shown in words and in the table.";
      box.append(note);
    }
    new ResizeObserver(() => {
      if (this.stage && this.rounds.length && (box.clientWidth !== this.stage.width || box.clientHeight !== this.stage.height)) {
        this.stage.resize();
        this.draw();
      }
    }).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  /** text.rounds may grow while it is shown, or lack some; then text.written(from, until) gives the tokens before. */
  show(text) {
    this.pause();
    this.text = text;
    this.rounds = text.rounds;
    this.written = text.written ?? Replay.writtenBy(text.rounds);
    this.index = 0;
    this.rebuild();
  }

  /** -> what gives a stretch of the text as [kind, token], where all of its rounds are there */
  static writtenBy(rounds) {
    const all = rounds.flatMap((round) => Data.keptOf(round).map((token) => [token.origin ?? "accepted", token]));
    return (from, until) => all.slice(from, until);
  }

  rebuild() {
    if (!this.stage) return;
    this.stage.build(this.slots, this.lanes);
    this.draw();
  }

  /** Rounds came: makes room for a longer draft than there was. */
  grow() {
    if (this.stage && (this.slots > this.stage.slots || this.lanes > this.stage.lanes)) this.rebuild();
  }

  get lanes() {
    return 1 + Math.max(0, ...this.rounds.flatMap(Data.lanesOf));
  }

  get slots() {
    return 1 + Math.max(1, ...this.rounds.map(Data.longestOf));
  }

  select(index) {
    this.index = index;
    this.u = 0.82;
    this.until = null;
    this.last = null;
    this.box.setAttribute("aria-label", this.rounds[index] ? `Replay of round ${index + 1}: ${Data.said(this.rounds[index])}` : "Replay");
    this.draw();
  }

  draw() {
    const round = this.rounds[this.index];
    this.events.onPhase(round ? Moment.phase(this.u) : "");
    if (!this.stage || !round) return;
    const previous = this.rounds[this.index - 1];
    const before = previous && previous.at + Data.keptOf(previous).length === round.at ? previous : undefined;
    const written = this.written(Math.max(0, round.at - 40), round.at);
    this.stage.draw(Moment.items(round, before, written, this.u, this.stage.depth), Moment.scan(round, this.u));
  }

  toggle() {
    if (this.isPlaying) this.pause();
    else this.play();
  }

  play() {
    if (!this.rounds.length) return;
    if (this.index === this.rounds.length - 1 && this.u >= 1) this.enter(0);
    this.setPlaying(true);
    this.until = null;
    this.run();
  }

  pause() {
    this.until = null;
    this.setPlaying(false);
  }

  setPlaying(isPlaying) {
    if (this.isPlaying === isPlaying) return;
    this.isPlaying = isPlaying;
    this.events.onPlaying(isPlaying);
  }

  /** To the end of this phase, or back to the end of the one before. */
  step(way) {
    this.pause();
    const ends = PHASES.map(([, end]) => end);
    if (way > 0) {
      let next = ends.find((end) => end > this.u + 1e-6);
      if (next === undefined) {
        if (this.index === this.rounds.length - 1) return;
        this.enter(this.index + 1);
        next = ends[0];
      }
      if (this.events.isStill()) this.moveTo(next);
      else {
        this.until = next;
        this.run();
      }
      return;
    }
    const previous = ends.filter((end) => end < this.u - 1e-6).pop();
    if (previous !== undefined) this.moveTo(previous);
    else if (this.index > 0) {
      this.enter(this.index - 1);
      this.moveTo(1);
    }
  }

  enter(index) {
    this.index = index;
    this.u = 0;
    this.events.onRound(index);
  }

  moveTo(u) {
    this.u = u;
    this.draw();
  }

  run() {
    if (this.frame) return;
    this.last = null;
    const tick = (now) => {
      this.frame = null;
      if (!this.isPlaying && this.until === null) return;
      this.advance(this.last === null ? 0 : Math.min(100, now - this.last));
      this.last = now;
      this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  advance(milliseconds) {
    if (this.isPlaying && this.events.isStill()) return this.advanceStill(milliseconds);
    if (this.isPlaying && this.u >= 1) return this.goOn();
    this.u = Math.min(this.until ?? 1, this.u + (milliseconds * this.speed) / ROUND_MS);
    if (this.until !== null && this.u >= this.until) this.until = null;
    else if (this.isPlaying && this.u >= 1) this.goOn();
    return this.draw();
  }

  /** Without motion: from the end of a phase to the end of the next. */
  advanceStill(milliseconds) {
    this.waited = (this.waited ?? 0) + milliseconds * this.speed;
    if (this.waited < ROUND_MS / PHASES.length) return;
    this.waited = 0;
    const next = PHASES.map(([, end]) => end).find((end) => end > this.u + 1e-6);
    if (next !== undefined) this.moveTo(next);
    else if (this.goOn()) this.moveTo(PHASES[0][1]);
  }

  /** To the next round; of a text that is still being written to the newest, for which it waits. */
  goOn() {
    const last = this.rounds.length - 1;
    if (this.index < last) this.enter(this.text.isOpen ? last : this.index + 1);
    else if (!this.text.isOpen) this.pause();
    return this.u === 0;
  }
}
