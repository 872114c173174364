// What the widgets share: elements, controls that follow a model, and a frame that redraws.
// A model has get, set, save_changes, on and off: anywidget's in a notebook, mount.js's on a page.

/** An element and what is in it; "svg:rect" is one of a picture, {onclick: f} a listener. */
export function node(name, attributes = {}, ...children) {
  const inPicture = name.startsWith("svg:");
  const element = inPicture
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const rect = (x, y, width, height, attributes) =>
  node("svg:rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), ...attributes });
export const line = (x1, y1, x2, y2, attributes) =>
  node("svg:line", { x1, y1, x2, y2, ...attributes });
export const text = (x, y, words, attributes) => node("svg:text", { x, y, ...attributes }, words);

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
export const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
export const thousands = (value) => value.toLocaleString("en-US");
export const plural = (count, word) => `${thousands(count)} ${word}${count === 1 ? "" : "s"}`;

/** Give the model new values, and tell the kernel if there is one. */
export function change(model, values) {
  for (const [name, value] of Object.entries(values)) model.set(name, value);
  model.save_changes();
}

// ---------------------------------------------------------------- controls
// Each is {element, follow}: follow(values) shows what the model holds.

const head = (label, output = null) =>
  node("div", { class: "head" }, node("span", { class: "name" }, label), output);

/** A slider of numbers from min to max, or of a list of values. */
export function slider(model, name, options) {
  const { label = name, min, max, step = 1, values, format = String } = options;
  const { read = (all) => all[name], write = (value) => ({ [name]: value }) } = options;
  const output = node("output", { "aria-hidden": "true" });
  const input = node("input", {
    type: "range",
    min: values ? 0 : min,
    max: values ? values.length - 1 : max,
    step: values ? 1 : step,
    "aria-label": label,
    "data-control": name,
    oninput: () => change(model, write(values ? values[+input.value] : +input.value)),
  });
  const element = node("label", { class: "control" }, head(label, output), input);
  function follow(all) {
    const value = read(all);
    if (values) input.max = values.length - 1; // a list may grow
    input.value = values ? values.indexOf(value) : value;
    output.textContent = format(value);
    input.setAttribute("aria-valuetext", format(value));
  }
  return { element, input, follow };
}

/** A list to choose from: [[value, words], ...]. */
export function menu(model, name, { label = name, options }) {
  const input = node(
    "select",
    {
      "aria-label": label,
      "data-control": name,
      onchange: () => change(model, { [name]: options[input.selectedIndex][0] }),
    },
    options.map(([value, words]) => node("option", { value }, words)),
  );
  const element = node("label", { class: "control" }, head(label), input);
  const follow = (all) => {
    input.selectedIndex = options.findIndex(([value]) => value === all[name]);
  };
  return { element, input, follow };
}

/** A box to tick. */
export function tick(model, name, options) {
  const { label = name } = options;
  const { read = (all) => all[name], write = (on) => ({ [name]: on }) } = options;
  const input = node("input", {
    type: "checkbox",
    "data-control": name,
    onchange: () => change(model, write(input.checked)),
  });
  const element = node("label", { class: "control tick" }, input, label);
  const follow = (all) => {
    input.checked = read(all);
  };
  return { element, input, follow };
}

export const button = (words, press, attributes) =>
  node("button", { type: "button", onclick: press, ...attributes }, words);

/** A button that calls advance once a beat until it is pressed again or advance returns false. */
export function player(words, advance, beat = 700) {
  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    element.textContent = words;
    element.setAttribute("aria-pressed", "false");
  }
  function beatOnce() {
    if (advance() === false) stop();
  }
  function press() {
    if (timer !== null) return stop();
    element.textContent = "Pause";
    element.setAttribute("aria-pressed", "true");
    timer = setInterval(beatOnce, beat);
    beatOnce();
  }
  const element = button(words, press, { "aria-pressed": "false", class: "play" });
  return { element, stop };
}

// ---------------------------------------------------------------- games: arrows, touch, buttons

const ARROWS = { ArrowUp: "↑", ArrowLeft: "←", ArrowDown: "↓", ArrowRight: "→" };

/** What a game of four moves needs of a frame; `go` is called with the name of an arrow. */
export function steering(go) {
  const pad = Object.entries(ARROWS).map(([name, sign]) =>
    button(sign, () => go(name), { "aria-label": name.slice(5).toLowerCase(), class: `arrow ${name}` }),
  );
  function press(x, y) {
    let gone = false; // one move a stroke
    return (toX, toY) => {
      const [right, down] = [toX - x, toY - y];
      if (gone || Math.max(Math.abs(right), Math.abs(down)) < 24) return;
      gone = true;
      const across = Math.abs(right) > Math.abs(down);
      go(across ? (right > 0 ? "ArrowRight" : "ArrowLeft") : down > 0 ? "ArrowDown" : "ArrowUp");
    };
  }
  const key = ({ key: name }) => name in ARROWS && (go(name), true);
  return { pad: node("div", { class: "pad" }, pad), press, key };
}

// ---------------------------------------------------------------- links
// An address holds what the widgets of its page show: #batch?num_generations=6/memory?card=L4

const SITE = "https://grpo-nb.github.io/grpo_nb/nbs/";
const alike = (a, b) => JSON.stringify(a) === JSON.stringify(b);
export const within = (value, [low, high]) => Number.isInteger(value) && value >= low && value <= high;

/** What an address holds for a widget: values that it has, of their kind, and legal. */
export function valuesIn(hash, name, widget) {
  const { defaults, linked = Object.keys(defaults), legal = () => true, whole = (all) => all } = widget;
  const part = hash.slice(1).split("/").find((one) => one.startsWith(`${name}?`)) ?? "";
  const found = {};
  for (const [key, words] of new URLSearchParams(part.slice(name.length + 1))) {
    const isText = typeof defaults[key] === "string";
    let value = words;
    try {
      if (!isText || words.startsWith('"')) value = JSON.parse(words);
    } catch {
      continue; // somebody has cut the address: the page's own value stays
    }
    const kind = [typeof value, Array.isArray(value)];
    const same = defaults[key] === null || alike(kind, [typeof defaults[key], Array.isArray(defaults[key])]);
    if (linked.includes(key) && same && legal(key, value)) found[key] = value;
  }
  return whole(found);
}

/** An address with a widget's values, none where they are as the page began; others' stay. */
export function linkTo(address, name, widget, values, start = widget.defaults) {
  const { defaults, linked = Object.keys(defaults), shorten = (all) => all } = widget;
  const url = new URL(address);
  const all = shorten(values);
  const words = new URLSearchParams();
  const moved = linked.some((key) => !alike(values[key], start[key]));
  for (const key of moved ? linked : []) {
    const usual = [start, defaults].every((one) => alike(values[key], one[key]));
    if (usual || !(key in all)) continue;
    const bare = typeof all[key] === "string" && !all[key].startsWith('"');
    words.set(key, bare ? all[key] : JSON.stringify(all[key]));
  }
  const others = url.hash.slice(1).split("/").filter((one) => one.includes("?") && !one.startsWith(`${name}?`));
  url.hash = [...others, ...(words.size ? [`${name}?${words}`] : [])].join("/");
  if (widget.inQuery) url.search = "";
  return url.href;
}

/** Take what the address holds, if it is `asked`, and keep it in step; whether it held anything. */
export function followLink(name, widget, model, start, asked = true) {
  const names = Object.keys(widget.defaults);
  const valuesNow = () => Object.fromEntries(names.map((key) => [key, model.get(key)]));
  let waiting = 0;
  function write() {
    clearTimeout(waiting);
    history.replaceState(history.state, "", linkTo(location.href, name, widget, valuesNow(), start));
    return location.href;
  }
  function read() {
    const query = widget.inQuery ? `#${name}${location.search}` : ""; // as links of old had it
    const found = { ...valuesIn(query, name, widget), ...valuesIn(location.hash, name, widget) };
    for (const [key, value] of Object.entries(found)) model.set(key, value);
    return Object.keys(found).length > 0;
  }
  const held = asked && read();
  model.link = write;
  addEventListener("hashchange", read);
  for (const key of widget.linked ?? names) {
    model.on(`change:${key}`, () => {
      clearTimeout(waiting);
      waiting = setTimeout(write, 300); // browsers refuse many changes a second
    });
  }
  return held;
}

// ---------------------------------------------------------------- the frame

/** Why a setting is refused or doubtful, and a chip for each change that mends it. */
function showProblem(box, model, problem) {
  box.hidden = !problem;
  const asked = problem ? problem.sentence : "";
  if (box.dataset.sentence === asked) return;
  box.dataset.sentence = asked;
  if (!problem) return box.replaceChildren();
  const chips = problem.changes.map((changes) => {
    const words = Object.entries(changes).map(([name, value]) => `${name} = ${value ?? "None"}`);
    return button(words.join(", "), () => change(model, changes), { class: "chip" });
  });
  box.replaceChildren(node("p", {}, asked), node("div", { class: "buttons" }, chips));
}

/** Put new shapes into a picture; the one that had the focus has it again. */
function repaint(picture, shapes, width, height) {
  const active = picture.getRootNode().activeElement;
  const key = active && picture.contains(active) && active.dataset.key;
  picture.setAttribute("width", width);
  picture.setAttribute("height", height);
  picture.replaceChildren(...shapes.flat(Infinity).filter(Boolean));
  if (key) picture.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
}

const legend = (entries) =>
  node("ul", { class: "legend" }, entries.map(([kind, words]) => {
    const patch = node("svg:svg", { width: 13, height: 13, "aria-hidden": "true" });
    patch.append(rect(0, 0, 13, 13, { class: kind }));
    return node("li", {}, patch, words);
  }));

/**
 * Controls above, a picture below, drawn again for every change and every width.
 *
 * name      "batch": the class is `grpo-batch-viz`
 * label     what the picture is, for those who do not see it
 * defaults  names of the model's values
 * controls  from slider, menu and tick
 * extra     more elements under the controls
 * check     values -> null or {sentence, changes, refused}: refused keeps the last picture, greyed
 * draw      (values, width) -> {shapes, height, caption}: the picture, and what it says in words
 * hint      what can be done with the picture
 * move      (x, y) -> whether something else is pointed at now; x is null where nothing is
 * press     (x, y) -> null, or a function of (x, y) that is called while the pointer is held
 * key       event -> whether the key said something
 * detail    values -> the words for what is pointed at, or null
 * legend    [[class, words], ...] of the picture's colours
 * facts     values -> rows of a table under the picture
 * task      {words, done}: what a reader is to try, in words or a function of the values, and
 *           values -> the sentence when it is done
 * below     what stands under all that
 * page      where the site shows it, for links from a notebook; what else `linkTo` reads
 */
export function frame(model, el, spec) {
  const picture = node("svg:svg", {
    role: spec.key ? "application" : "group",
    "aria-label": spec.label,
    tabindex: spec.key ? 0 : null,
  });
  const problem = node("div", { class: "problem", role: "alert", hidden: true });
  const caption = node("p", { class: "caption", role: "status", "aria-live": "polite" });
  const detail = node("p", { class: "detail", "aria-live": spec.key ? "polite" : null });
  const facts = node("table", { class: "facts" });
  const task = node("p", { class: "task", "aria-live": "polite" });
  const told = node("span", { class: "told", "aria-live": "polite" });
  const copy = button("Copy a link to this", () => {
    const address = model.link?.() ?? linkTo(`${SITE}${spec.page}.html`, spec.name, spec, valuesNow());
    navigator.clipboard?.writeText(address).catch(() => {});
    told.textContent = model.link ? "The address of this page now holds the settings." : address;
  });
  const box = node("div", { class: "picture" }, picture);
  const root = node(
    "section",
    { class: `grpo-widget grpo-${spec.name}-viz`, "aria-label": spec.label },
    spec.task ? task : null,
    node("div", { class: "controls" }, spec.controls.map((control) => control.element)),
    spec.extra ? node("div", { class: "buttons" }, spec.extra) : null,
    box,
    spec.legend ? legend(spec.legend) : null,
    problem,
    caption,
    detail,
    spec.facts ? facts : null,
    spec.below ?? null,
    model.link || spec.page ? node("div", { class: "buttons" }, copy, told) : null,
  );
  el.append(root);

  const names = Object.keys(spec.defaults);
  const valuesNow = () => Object.fromEntries(names.map((name) => [name, model.get(name)]));

  function draw() {
    const values = valuesNow();
    const trouble = spec.check?.(values) ?? null;
    spec.controls.forEach((control) => control.follow(values));
    root.classList.toggle("refused", Boolean(trouble?.refused));
    showProblem(problem, model, trouble);
    if (trouble?.refused) return;
    const width = Math.floor(clamp(box.clientWidth || 600, 280, 976));
    const drawn = spec.draw(values, width);
    repaint(picture, drawn.shapes, width, drawn.height);
    if (caption.textContent !== drawn.caption) caption.textContent = drawn.caption;
    if (spec.task) showTask(values);
    const words = spec.detail?.(values) ?? spec.hint;
    if (detail.textContent !== words) detail.textContent = words;
    const rows = spec.facts?.(values) ?? [];
    facts.replaceChildren(
      ...rows.map(([name, ...cells]) =>
        node("tr", {}, node("th", { scope: "row" }, name), cells.map((c) => node("td", {}, c))),
      ),
    );
  }

  function showTask(values) {
    const { words, done } = spec.task;
    const end = done(values);
    const asked = typeof words === "string" ? words : words(values);
    const tried = end ? `Done. ${end}` : asked && `Your task: ${asked}`;
    if (task.textContent !== tried) task.textContent = tried;
    task.classList.toggle("done", Boolean(end));
  }

  let waiting = 0; // one drawing a frame, however many values have changed
  function redraw() {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  }

  let drag = null;
  const place = (event) => {
    const { left, top } = picture.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  picture.addEventListener("pointerdown", (event) => {
    drag = spec.press?.(...place(event)) ?? null;
    if (drag) {
      picture.setPointerCapture(event.pointerId);
      drag(...place(event));
    }
    if (spec.move?.(...place(event))) redraw();
  });
  picture.addEventListener("pointermove", (event) => {
    if (drag) drag(...place(event));
    if (spec.move?.(...place(event))) redraw();
  });
  for (const end of ["pointerup", "pointercancel"]) {
    picture.addEventListener(end, () => {
      drag = null;
    });
  }
  picture.addEventListener(
    "touchstart", // a finger on a grip drags it, and does not scroll the page
    (event) => event.target.closest(".grip") && event.preventDefault(),
    { passive: false },
  );
  picture.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && !drag && spec.move?.(null, null)) redraw();
  });
  picture.addEventListener("keydown", (event) => {
    if (!spec.key?.(event)) return;
    event.preventDefault();
    event.stopPropagation(); // a notebook has meanings of its own for arrows
    redraw();
  });
  root.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, button")) event.stopPropagation();
  });

  const watch = new ResizeObserver(redraw);
  watch.observe(box);
  names.forEach((name) => model.on(`change:${name}`, redraw));
  draw();
  const leave = () => {
    watch.disconnect();
    names.forEach((name) => model.off(`change:${name}`, redraw));
  };
  return { redraw, leave };
}

/** What arrow keys make of a number; null for any other key. */
export function keyed(event, value, { min, max, step, page = 5 * step }) {
  const moves = {
    ArrowRight: value + step,
    ArrowUp: value + step,
    ArrowLeft: value - step,
    ArrowDown: value - step,
    PageUp: value + page,
    PageDown: value - page,
    Home: min,
    End: max,
  };
  if (!(event.key in moves)) return null;
  return snap(moves[event.key], { min, max, step });
}

/** The nearest legal place of a slider. */
export function snap(value, { min, max, step }) {
  const steps = Math.round((clamp(value, min, max) - min) / step);
  return clamp(Number((min + steps * step).toFixed(6)), min, max);
}
