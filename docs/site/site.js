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
