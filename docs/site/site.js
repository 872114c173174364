// What is wider than its column scrolls by itself: the keyboard has to reach it.
const WIDE = ".bd-article :is(table, .cell_output, div.math mjx-container)";
// A drawing that would shrink to less than 0.6 of its size, words and all, keeps 0.7 and scrolls.
const legible = () => document.querySelectorAll(".bd-article .cell_output img").forEach((img) => {
  const room = img.closest(".cell_output").clientWidth;
  img.style.minWidth = 0.6 * img.naturalWidth > room ? `${0.7 * img.naturalWidth}px` : "";
});
const reach = () => document.querySelectorAll(WIDE).forEach((box) => {
  const wide = box.scrollWidth > box.clientWidth + 1;
  box.classList.toggle("wide", wide);
  if (wide) box.tabIndex = 0;
  else if (box.tagName !== "MJX-CONTAINER") box.removeAttribute("tabindex");  // it has one of its own
});
for (const when of ["load", "resize"]) addEventListener(when, () => { legible(); reach(); }, true);  // of pictures too

// Where a page has widgets, a button leads to the first one.
document.addEventListener("DOMContentLoaded", () => {
  const [line, widget] = [".run-it", ".bd-article .widget"].map((what) => document.querySelector(what));
  if (!line || !widget) return;
  widget.id ||= "widget";
  line.insertAdjacentHTML("beforeend", `<a href="#${widget.id}">To the widget</a>`);
});

// One button on a page with folded code: open all folds, or close them again.
document.addEventListener("DOMContentLoaded", () => {
  const folds = [...document.querySelectorAll("div.cell details.hide")];
  const line = document.querySelector(".run-it");
  if (!line || !folds.length) return;
  const button = document.createElement("button");
  button.id = "open-folds";
  button.type = "button";
  const say = () => { button.textContent = folds.every((fold) => fold.open) ? "Fold the code" : "Unfold all code"; };
  button.addEventListener("click", () => {
    const open = !folds.every((fold) => fold.open);
    folds.forEach((fold) => { fold.open = open; });
    say();
  });
  folds.forEach((fold) => fold.addEventListener("toggle", say));
  say();
  line.append(button);
});

// The list of pages: a section opens at a click, and the one that holds this page is open (on the
// first page, the afternoon).
document.addEventListener("DOMContentLoaded", () => {
  const bar = document.querySelector(".bd-sidebar-primary nav");
  const here = bar?.querySelector("p.caption + ul .current");
  for (const caption of bar?.querySelectorAll("p.caption") ?? []) {
    const list = caption.nextElementSibling;
    if (list?.tagName !== "UL") continue;
    const fold = document.createElement("details");
    const title = document.createElement("summary");
    fold.open = here ? list.contains(here) : /afternoon/.test(caption.textContent);
    title.textContent = caption.textContent;
    title.className = "caption";
    caption.replaceWith(fold);
    fold.append(title, list);
  }
});
