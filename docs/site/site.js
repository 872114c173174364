// What is wider than its column scrolls by itself: the keyboard has to reach it.
const WIDE = ".bd-article table, .bd-article div.math, .bd-article .cell_output";
const reach = () => document.querySelectorAll(WIDE).forEach((box) => {
  if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
  else box.removeAttribute("tabindex");
});
addEventListener("load", reach);
addEventListener("resize", reach);

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
