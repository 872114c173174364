// How the search ranks: a lesson before a page about a module, that before the reference.
var Scorer = {
  score: ([docname, , , , score]) => score
    + (/^nbs\/(lessons|tutorials|algorithm)\//.test(docname) ? 12 : 0)
    - (/^(api|CHANGELOG)/.test(docname) ? 12 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
